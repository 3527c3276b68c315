// SPDX-License-Identifier: Apache-2.0
// A call on host memory runs on the CPU and leaves the GPU alone: no CUDA context, which would take
// seconds and hundreds of megabytes of the card. A program of its own, as other tests create one.
#include <cuda.h>
#include <gtest/gtest.h>

#include <vector>

#include "flash3/flash3.hpp"
#include "hopper/host/driver.hpp"

namespace flash3 {
namespace {

TEST(HostCall, CreatesNoContext) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();

  std::vector<float> q(64 * 32, 1.f), out(64 * 32);
  const auto view = [](std::vector<float>& x) {
    return tensor(x.data(), FLASH3_FLOAT32, {1, 64, 1, 32});
  };
  forward({.q = view(q), .k = view(q), .v = view(q), .out = view(out)});
  EXPECT_FLOAT_EQ(out[0], 1.f);

  const auto get_state = hopper::driver_function<decltype(&cuDevicePrimaryCtxGetState)>(
      "cuDevicePrimaryCtxGetState", 7000);
  ASSERT_NE(get_state, nullptr);
  unsigned flags = 0;
  int active = -1;
  ASSERT_EQ(get_state(0, &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 0);
}

}  // namespace
}  // namespace flash3
