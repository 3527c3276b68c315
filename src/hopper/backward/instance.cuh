// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes.
#pragma once

#include "hopper/backward/instances.hpp"
#include "hopper/backward/kernel.cuh"

#define FLASH3_BACKWARD_INSTANCE(ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND, TILE_M)                      \
  template <>                                                                                      \
  const void* flash3::hopper::backward_kernel_function<flash3::hopper::Element::ELEMENT, HEAD_DIM, \
                                                       HEAD_DIM_V, BAND, TILE_M>() {               \
    return reinterpret_cast<const void*>(                                                          \
        &backward_kernel<BackwardTraits<flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM_V,    \
                                        BAND, TILE_M>>);                                           \
  }

// With a softcap, under any mask.
#define FLASH3_BACKWARD_SOFTCAP_INSTANCE(ELEMENT, HEAD_DIM, TILE_M)                               \
  template <>                                                                                     \
  const void*                                                                                     \
  flash3::hopper::backward_kernel_function<flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM,  \
                                           true, TILE_M, flash3::hopper::ScoreKind::kSoftcap>() { \
    return reinterpret_cast<const void*>(                                                         \
        &backward_kernel<BackwardTraits<flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM,     \
                                        true, TILE_M, flash3::hopper::ScoreKind::kSoftcap>>);     \
  }
