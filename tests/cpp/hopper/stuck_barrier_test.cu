// SPDX-License-Identifier: Apache-2.0
// A debug build must name a barrier that is never completed and trap, not hang. Compiled with
// FLASH3_DEBUG_BARRIERS whatever the library is built with. A program of its own: a trap takes the
// CUDA context with it.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "cuda/sm90/device/pipeline.cuh"

namespace {

using namespace flash3::cuda;
using namespace flash3::cuda::sm90;

__global__ void wait_for_nobody() {
  __shared__ uint64_t barrier;
  mbarrier_init(&barrier, 1);
  wait(&barrier, 0, "v_full");
}

TEST(StuckBarrier, TrapsWithItsName) {
  int devices = 0, major = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  }
  if (major != 9) GTEST_SKIP() << "no Hopper GPU";

  testing::internal::CaptureStdout();
  wait_for_nobody<<<1, 1>>>();
  const cudaError_t error = cudaDeviceSynchronize();
  const std::string printed = testing::internal::GetCapturedStdout();
  EXPECT_EQ(error, cudaErrorLaunchFailure) << cudaGetErrorString(error);
  EXPECT_NE(printed.find("stuck on barrier v_full"), std::string::npos) << printed;
}

}  // namespace
