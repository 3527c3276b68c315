// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch.
#pragma once

#include <cuda_runtime_api.h>

namespace flash3::cuda {

// A launch attribute: the kernel's blocks may begin while the previous kernel of the stream still
// runs, and wait for its end themselves (device/ptx/sync.cuh).
inline cudaLaunchAttribute programmatic_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Enqueues a kernel; `overlaps`: as programmatic_launch() says.
template <class Params>
cudaError_t launch_overlapping(void (*kernel)(Params), dim3 blocks, int threads, void* stream,
                               Params params, bool overlaps = true) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(unsigned(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute overlap = programmatic_launch();
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace flash3::cuda
