// SPDX-License-Identifier: Apache-2.0
// Whose memory is whose, of whatever GPU.
#pragma once

#include "core/status.hpp"

namespace flash3::cuda {

// Memory that lives on a GPU: device or managed allocations. CUDA_ERROR if a fault has ended the
// context: the driver then no longer tells device memory from the host's.
Status is_device_memory(const void* address, bool* answer);

// Memory that lives on a GPU and that the host cannot touch: device allocations. Errors are as of
// is_device_memory.
Status is_device_only_memory(const void* address, bool* answer);

}  // namespace flash3::cuda
