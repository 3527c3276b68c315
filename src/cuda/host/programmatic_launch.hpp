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

}  // namespace flash3::cuda
