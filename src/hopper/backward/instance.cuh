// SPDX-License-Identifier: Apache-2.0
// What a generated file includes (cmake/kernel_instances.cmake).
#pragma once

#include "hopper/backward/instances.hpp"
#include "hopper/backward/kernel.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND, SCORE, TILE_M, TILE_N) \
  template <>                                                                              \
  const void* flash3::hopper::backward_kernel_function<                                    \
      flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND,                        \
      flash3::hopper::ScoreKind::SCORE, TILE_M, TILE_N>() {                                \
    using namespace flash3::hopper;                                                        \
    return reinterpret_cast<const void*>(                                                  \
        &backward_kernel<BackwardTraits<Element::ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND,      \
                                        ScoreKind::SCORE, TILE_M, TILE_N>>);               \
  }
