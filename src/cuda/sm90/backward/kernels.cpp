// SPDX-License-Identifier: Apache-2.0
// The list of the backward kernels.
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/backward/tile_table.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "cuda/sm90/host/kernel_list.hpp"

namespace flash3::cuda::sm90 {

std::span<const BackwardKernel> backward_kernels() {
  static const auto list = list_kernels<kBackwardConfigs>(
      [](Element element, const BackwardConfig& c, const void* function) {
        return BackwardKernel{kernel_id("bwd", element, c, c.tile_m), element, c, function};
      });
  return list;
}

}  // namespace flash3::cuda::sm90
