// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes.
#pragma once

#include "device/ablation/variants.hpp"
#include "hopper/forward/kernel.cuh"
#include "hopper/forward_fp8/kernel.cuh"

#define FLASH3_ABLATION_INSTANCE(SCHEDULE, TILE_N)                                           \
  template <>                                                                                \
  const void*                                                                                \
  flash3::device::ablation_kernel<flash3::device::SCHEDULE, flash3::device::TILE_N>() {      \
    using namespace flash3::hopper;                                                          \
    return reinterpret_cast<const void*>(                                                    \
        &forward_kernel<ForwardTraits<Element::kFloat16, kAblationHeadDim, kAblationHeadDim, \
                                      false, TILE_N, SCHEDULE>>);                            \
  }

#define FLASH3_FP8_ABLATION_INSTANCE(SCHEDULE, TILE_N)                                      \
  template <>                                                                               \
  const void*                                                                               \
  flash3::device::fp8_ablation_kernel<flash3::device::SCHEDULE, flash3::device::TILE_N>() { \
    using namespace flash3::hopper;                                                         \
    return reinterpret_cast<const void*>(                                                   \
        &fp8_forward_kernel<Fp8Traits<kAblationHeadDim, kAblationHeadDim, false, TILE_N,    \
                                      ScoreKind::kPlain, SCHEDULE>>);                       \
  }
