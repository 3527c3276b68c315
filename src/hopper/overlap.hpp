// SPDX-License-Identifier: Apache-2.0
// Launches that overlap with the kernel before them (programmatic dependent launch).
#pragma once

#include <cuda_runtime_api.h>

namespace flash3::hopper {

// A launch attribute: the kernel's blocks may begin while the previous kernel of the stream still
// runs, and wait for its end themselves (device/ptx/grid.cuh).
inline cudaLaunchAttribute overlap_with_previous_kernel() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace flash3::hopper
