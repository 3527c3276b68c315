// SPDX-License-Identifier: Apache-2.0
// What a backward kernel is launched with: one structure for all, of which each reads what its row
// needs. Host and device.
#pragma once

#include "core/mask_lists.hpp"
#include "cuda/device/score/bias.hpp"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/device/bias_tiles.hpp"

namespace flash3::cuda::sm90 {

struct BackwardKernelParams : BackwardParams {
  MaskMemory mask;    // only of a kernel that walks lists
  BiasParams biased;  // only of a kernel of biased scores
  // Only of a kernel of a bias of each pair. gradient: of which this kernel stores each tile; it
  // has the element type of q and one element for each pair.
  BiasTiles bias_tiles, gradient;
};

// The roles of such kernels have what all kernels' roles have.
FLASH3_HOST_DEVICE constexpr const BackwardKernelParams& kernel_params(
    const BackwardParams& params) {
  return static_cast<const BackwardKernelParams&>(params);
}

}  // namespace flash3::cuda::sm90
