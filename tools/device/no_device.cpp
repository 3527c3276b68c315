// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "device/ablation.hpp"
#include "device/ceiling.hpp"
#include "device/device.hpp"
#include "device/launches.hpp"

namespace flash3::device {

static constexpr const char* kReason = "this flash3 was built without CUDA";

std::vector<Gpu> gpus(std::string* reason) {
  *reason = kReason;
  return {};
}

CudaVersions cuda_versions() { return {}; }

std::unique_ptr<cases::Memory> make_device_memory() { throw std::runtime_error(kReason); }

CeilingResult measure_ceiling(flash3_dtype, int, double, const Gpu&, Monitor&, cases::Memory&) {
  throw std::runtime_error(kReason);
}

std::vector<AblationVariant> ablation_variants(const flash3_forward_params&) {
  throw std::runtime_error(kReason);
}

void start_launch_log() {}

std::set<std::string> stop_launch_log() { return {}; }

}  // namespace flash3::device
