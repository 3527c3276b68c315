// SPDX-License-Identifier: Apache-2.0
// What a generated file of an FP8 kernel includes (cmake/kernel_instances.cmake).
#pragma once

#include "hopper/forward/instances.hpp"
#include "hopper/forward_fp8/kernel.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND, SCORE, TILE_M, TILE_N)     \
  template <>                                                                                  \
  const void* flash3::hopper::forward_kernel_function<                                         \
      flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND,                            \
      flash3::hopper::ScoreKind::SCORE, TILE_M, TILE_N>() {                                    \
    using namespace flash3::hopper;                                                            \
    return reinterpret_cast<const void*>(                                                      \
        &fp8_forward_kernel<Fp8Traits<HEAD_DIM, HEAD_DIM_V, BAND, TILE_N, ScoreKind::SCORE>>); \
  }
