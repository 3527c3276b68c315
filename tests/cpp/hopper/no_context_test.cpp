// SPDX-License-Identifier: Apache-2.0
// What a process has of a CUDA context. A call on host memory runs on the CPU and creates none,
// which would take seconds and hundreds of megabytes of the card; a call on a device that has been
// reset runs as the first one did. A program of its own, as other tests need their context.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "cuda/host/driver.hpp"
#include "flash3/flash3.hpp"

namespace flash3 {
namespace {

TEST(Context, IsNotCreatedByAHostCall) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();

  std::vector<float> q(64 * 32, 1.f), out(64 * 32);
  const auto view = [](std::vector<float>& x) {
    return tensor(x.data(), FLASH3_FLOAT32, {1, 64, 1, 32});
  };
  forward({.q = view(q), .k = view(q), .v = view(q), .out = view(out)});
  EXPECT_FLOAT_EQ(out[0], 1.f);

  const auto get_state = cuda::driver_function<decltype(&cuDevicePrimaryCtxGetState)>(
      "cuDevicePrimaryCtxGetState", 7000);
  ASSERT_NE(get_state, nullptr);
  unsigned flags = 0;
  int active = -1;
  ASSERT_EQ(get_state(0, &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 0);
}

// 64 queries and keys of one head, v = 1: out is 1 as bfloat16.
void expect_ones() {
  constexpr size_t kElements = 64 * 64;
  const std::vector<uint16_t> ones(kElements, 0x3F80);
  std::vector<uint16_t> out(kElements);
  uint16_t* device[2] = {};
  for (uint16_t*& x : device) {
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&x), kElements * 2), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(x, ones.data(), kElements * 2, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ASSERT_EQ(cudaMemset(device[1], 0, kElements * 2), cudaSuccess);
  const auto view = [](uint16_t* x) { return tensor(x, FLASH3_BFLOAT16, {1, 64, 1, 64}); };
  const Tensor q = view(device[0]);
  ASSERT_NO_THROW(forward({.q = q, .k = q, .v = q, .out = view(device[1])}));
  ASSERT_EQ(cudaMemcpy(out.data(), device[1], kElements * 2, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(out, ones);
  for (uint16_t* x : device) EXPECT_EQ(cudaFree(x), cudaSuccess);
}

TEST(Context, MayBeReset) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  expect_ones();
  ASSERT_EQ(cudaDeviceReset(), cudaSuccess);
  expect_ones();
}

}  // namespace
}  // namespace flash3
