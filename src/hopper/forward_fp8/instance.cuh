// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes.
#pragma once

#include "hopper/forward/instances.hpp"
#include "hopper/forward_fp8/kernel.cuh"

#define FLASH3_FP8_FORWARD_INSTANCE(HEAD_DIM, HEAD_DIM_V, BAND, TILE_N, SCORE)                  \
  template <>                                                                                   \
  const void*                                                                                   \
  flash3::hopper::forward_kernel_function<flash3::hopper::Element::kE4m3, HEAD_DIM, HEAD_DIM_V, \
                                          BAND, TILE_N, flash3::hopper::ScoreKind::SCORE>() {   \
    return reinterpret_cast<const void*>(                                                       \
        &fp8_forward_kernel<                                                                    \
            Fp8Traits<HEAD_DIM, HEAD_DIM_V, BAND, TILE_N, flash3::hopper::ScoreKind::SCORE>>);  \
  }
