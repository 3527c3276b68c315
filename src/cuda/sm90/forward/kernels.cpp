// SPDX-License-Identifier: Apache-2.0
// The list of the forward kernels.
#include "cuda/sm90/forward/kernels.hpp"

#include "cuda/sm90/forward/tile_table.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "cuda/sm90/host/kernel_list.hpp"

namespace flash3::cuda::sm90 {

std::span<const ForwardKernel> forward_kernels() {
  static const auto list = list_kernels<kForwardConfigs>(
      [](Element element, const ForwardConfig& c, const void* function) {
        return ForwardKernel{kernel_id("fwd", element, c, c.tile_m()), element, c, function};
      });
  return list;
}

}  // namespace flash3::cuda::sm90
