// SPDX-License-Identifier: Apache-2.0
// The launch of an attention kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status.hpp"
#include "hopper/host/cuda_status.hpp"
#include "hopper/host/programmatic_launch.hpp"

namespace flash3::hopper {

// blocks × threads, with so much dynamic shared memory. after_kernel: the kernel waits itself for
// the one before it, which this call has launched.
template <class Params>
Status launch_kernel(const void* function, int blocks, int threads, int shared_bytes,
                     Params* params, void* stream, bool after_kernel, const char* what) {
  FLASH3_CHECK(cuda_status(
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "reserving shared memory"));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(blocks));
  launch.blockDim = dim3(unsigned(threads));
  launch.dynamicSmemBytes = size_t(shared_bytes);
  launch.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute programmatic = programmatic_launch();
  launch.attrs = &programmatic;
  launch.numAttrs = after_kernel ? 1 : 0;
  void* arguments[] = {params};
  return cuda_status(cudaLaunchKernelExC(&launch, function, arguments), what);
}

}  // namespace flash3::hopper
