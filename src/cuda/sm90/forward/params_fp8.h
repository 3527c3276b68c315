// SPDX-License-Identifier: Apache-2.0
// What kernels whose keys are FP8 are launched with beside what all are. Host and device.
#pragma once

#include "core/scales.hpp"
#include "cuda/sm90/forward/params.h"

namespace flash3::cuda::sm90 {

struct Fp8Params {
  ScaleView q_scale, k_scale, v_scale;
  float q_factor;           // of Q's scales: softmax_scale · log2 e, or 1 under a softcap
  bool q_packed, k_packed;  // scales are counted as those of packed tensors
  int flush_tiles;          // key tiles between two flushes of O, a power of two (output_sums.cuh)
  void* sums;               // where they go, if there is no room in shared memory
};

struct ScaledForwardParams : ForwardParams {
  Fp8Params fp8;
};

FLASH3_HOST_DEVICE constexpr const Fp8Params& fp8_params(const ForwardParams& params) {
  return static_cast<const ScaledForwardParams&>(params).fp8;
}

}  // namespace flash3::cuda::sm90
