// SPDX-License-Identifier: Apache-2.0
// What is known of the GPU without touching it.
#pragma once

#include <cstdint>
#include <string>

#include "core/status.hpp"

namespace flash3::cuda {

// What the blocks that run at the same time should share, in bytes: it fits the half of the L2
// cache (50 MB on the H100 and up) that is near, beside the rest.
inline constexpr int64_t kL2Budget = 16 << 20;

struct Device {
  int index = 0;
  int multiprocessors = 0;
};

// The current device, if it is a Hopper GPU that a driver is there for; otherwise UNSUPPORTED and
// why, or CUDA_ERROR if its context is lost.
Status current_device(Device* device);

// Whether a plan that was made for this device may run now.
Status check_is_current(const Device& device);

std::string device_name(const Device& device);

// Memory that lives on a GPU: device or managed allocations. CUDA_ERROR if a fault has ended the
// context: the driver then no longer tells device memory from the host's.
Status is_device_memory(const void* address, bool* answer);

// Memory that lives on a GPU and that the host cannot touch: device allocations. Errors are as of
// is_device_memory.
Status is_device_only_memory(const void* address, bool* answer);

}  // namespace flash3::cuda
