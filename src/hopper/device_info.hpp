// What is known of the GPU without touching it.
#pragma once

#include <string>

#include "core/status.hpp"

namespace flash3::hopper {

struct Device {
  int index = 0;
  int multiprocessors = 0;
};

// The current device, if it is a Hopper GPU that a driver is there for; otherwise UNSUPPORTED and
// why.
Status current_device(Device* device);

std::string device_name(const Device& device);

// Memory that lives on a GPU: device or managed allocations.
bool is_device_memory(const void* address);

// The device allocations among it, which the host cannot touch.
bool is_device_only_memory(const void* address);

}  // namespace flash3::hopper
