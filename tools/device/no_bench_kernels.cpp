// SPDX-License-Identifier: Apache-2.0
// In place of ablation.cpp, ceiling.cpp and trace.cpp in a build without their kernels.
#include <stdexcept>

#include "device/bench_kernels.hpp"
#include "device/device.hpp"

namespace flash3::device {

void require_bench_kernels(const std::string& what) {
  throw std::runtime_error(
      what +
      " needs kernels that this build of flash3 leaves out; make bench builds them "
      "(-DFLASH3_BENCH_KERNELS=ON, with a CUDA compiler)");
}

CeilingResult measure_ceiling(flash3_dtype, int, double, const Gpu&, Monitor&, cases::Memory&) {
  require_bench_kernels("the ceiling");
  return {};
}

std::vector<AblationVariant> ablation_variants(const flash3_forward_params&) {
  require_bench_kernels("the ablation");
  return {};
}

TracedCall traced_call(const flash3_forward_params&, int, cases::Memory&) {
  require_bench_kernels("a trace");
  return {};
}

}  // namespace flash3::device
