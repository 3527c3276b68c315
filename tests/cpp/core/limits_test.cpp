// SPDX-License-Identifier: Apache-2.0
// limits.h: what a backend says of its head dims is what it answers when a call is made.
#include "flash3/limits.h"

#include <gtest/gtest.h>

#include <string>

#include "flash3/flash3.hpp"

namespace flash3::test {
namespace {

Result ask(flash3_head_dims_of calls, int64_t dim, int64_t dim_v) {
  const bool fp8 = calls == FLASH3_HEAD_DIMS_OF_FORWARD_FP8;
  const flash3_dtype dtype = fp8 ? FLASH3_FLOAT8_E4M3 : FLASH3_FLOAT16;
  const Tensor q = tensor(nullptr, dtype, {1, 20, 2, dim});
  const Tensor v = tensor(nullptr, dtype, {1, 20, 2, dim_v});
  const Tensor out = tensor(nullptr, FLASH3_FLOAT16, {1, 20, 2, dim_v});
  if (calls == FLASH3_HEAD_DIMS_OF_BACKWARD)
    return supported(Backward{.dout = out,
                              .q = q,
                              .k = q,
                              .v = v,
                              .out = out,
                              .lse = lse_tensor(nullptr, 1, 2, 20),
                              .dq = q,
                              .dk = q,
                              .dv = v,
                              .backend = FLASH3_BACKEND_CPU});
  return supported(Forward{.q = q, .k = q, .v = v, .out = out, .backend = FLASH3_BACKEND_CPU});
}

TEST(Limits, OfTheCpuAreWhatItTakes) {
  for (const auto calls : {FLASH3_HEAD_DIMS_OF_FORWARD, FLASH3_HEAD_DIMS_OF_FORWARD_FP8,
                           FLASH3_HEAD_DIMS_OF_BACKWARD}) {
    int32_t most = 0, most_v = 0;
    ASSERT_EQ(flash3_backend_head_dims(FLASH3_BACKEND_CPU, calls, &most, &most_v), FLASH3_OK);
    for (int64_t dim = 1; dim <= most; ++dim)
      EXPECT_TRUE(ask(calls, dim, 8)) << calls << ' ' << dim;
    for (int64_t dim = 1; dim <= most_v; ++dim)
      EXPECT_TRUE(ask(calls, 8, dim)) << calls << ' ' << dim;
    EXPECT_TRUE(ask(calls, most, most_v)) << calls;
    EXPECT_EQ(ask(calls, most + 1, 8).message(), "q.shape[3] = " + std::to_string(most + 1) +
                                                     " but head_dim must be from 1 to " +
                                                     std::to_string(most));
    EXPECT_EQ(ask(calls, 8, most_v + 1).message(), "v.shape[3] = " + std::to_string(most_v + 1) +
                                                       " but head_dim_v must be from 1 to " +
                                                       std::to_string(most_v));
  }
}

TEST(Limits, OfTheHopperBackendNeedNoGpu) {
  for (const auto calls : {FLASH3_HEAD_DIMS_OF_FORWARD, FLASH3_HEAD_DIMS_OF_FORWARD_FP8,
                           FLASH3_HEAD_DIMS_OF_BACKWARD}) {
    int32_t most = 77, most_v = 78;
    const auto status = flash3_backend_head_dims(FLASH3_BACKEND_HOPPER, calls, &most, &most_v);
    if (status == FLASH3_UNSUPPORTED) {
      EXPECT_NE(std::string(flash3_last_error()).find("is not built into this library"),
                std::string::npos);
      EXPECT_TRUE(most == 77 && most_v == 78);
      continue;
    }
    EXPECT_EQ(status, FLASH3_OK) << flash3_last_error();
    EXPECT_TRUE(most == 256 && most_v == 256) << most << ' ' << most_v;
  }
}

TEST(Limits, Misuse) {
  int32_t most = 77, most_v = 78;
  const auto error = [&](int backend, int calls, int32_t* dim, int32_t* dim_v) {
    const auto status = flash3_backend_head_dims(
        static_cast<flash3_backend>(backend), static_cast<flash3_head_dims_of>(calls), dim, dim_v);
    EXPECT_EQ(status, FLASH3_INVALID_ARGUMENT);
    return std::string(flash3_last_error());
  };
  EXPECT_EQ(error(FLASH3_BACKEND_CPU, 3, &most, &most_v),
            "calls = 3 but it must be 0 (forward), 1 (forward in FP8) or 2 (backward)");
  EXPECT_EQ(error(FLASH3_BACKEND_AUTO, 0, &most, &most_v),
            "backend = 0 (auto) but it must be 1 (hopper) or 2 (cpu)");
  EXPECT_EQ(error(7, 0, &most, &most_v),
            "backend = 7 but it must be 0 (auto), 1 (hopper) or 2 (cpu)");
  EXPECT_EQ(error(FLASH3_BACKEND_CPU, 0, nullptr, &most_v),
            "head_dim is null; it must point to where the result goes");
  EXPECT_EQ(error(FLASH3_BACKEND_CPU, 0, &most, nullptr),
            "head_dim_v is null; it must point to where the result goes");
  EXPECT_TRUE(most == 77 && most_v == 78);
}

}  // namespace
}  // namespace flash3::test
