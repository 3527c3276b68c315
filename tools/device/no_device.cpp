// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "device/device.hpp"

namespace flash3::device {

static constexpr const char* kReason = "this flash3 was built without CUDA";

std::vector<Gpu> gpus(std::string* reason) {
  *reason = kReason;
  return {};
}

CudaVersions cuda_versions() { return {}; }

std::unique_ptr<cases::Memory> make_device_memory() { throw std::runtime_error(kReason); }

void start_launch_log() {}

std::set<std::string> stop_launch_log() { return {}; }

}  // namespace flash3::device
