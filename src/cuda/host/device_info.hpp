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

// "9.0" is {9, 0}.
struct Capability {
  int major = 0, minor = 0;
  bool operator==(const Capability&) const = default;
};

struct Device {
  int index = 0;
  int multiprocessors = 0;
  Capability capability{};
};

// The current device, if a driver is there for it; otherwise UNSUPPORTED and why, or CUDA_ERROR if
// its context is lost.
Status current_device(Device* device);

// Whether a plan that was made for this device may run now.
Status check_is_current(const Device& device);

std::string device_name(const Device& device);

// Whether an error means that a fault has ended the device's context: every call then fails, until
// the process ends. Of the runtime or of the driver, whose codes have the same numbers.
bool is_context_lost(int error);
// The failure of a call that finds it so.
Status context_lost(int error);

}  // namespace flash3::cuda
