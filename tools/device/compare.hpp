// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace flash3::device {

// Enqueues a comparison: *differ becomes 1 if the bytes are not the same. All on the device.
cudaError_t note_difference(const void* a, const void* b, size_t bytes, int* differ,
                            cudaStream_t stream);

}  // namespace flash3::device
