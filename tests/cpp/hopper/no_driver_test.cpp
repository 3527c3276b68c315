// SPDX-License-Identifier: Apache-2.0
// What a machine without a driver is told: not that its driver is too old, as the runtime has it.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "flash3/flash3.h"

namespace flash3 {
namespace {

TEST(NoDriver, IsCalledThat) {
  if (dlopen("libcuda.so.1", RTLD_LAZY)) GTEST_SKIP() << "this machine has a driver";
  EXPECT_EQ(flash3_backend_available(FLASH3_BACKEND_HOPPER), FLASH3_UNSUPPORTED);
  EXPECT_STREQ(flash3_last_error(), "no CUDA device: no NVIDIA driver found");
}

}  // namespace
}  // namespace flash3
