// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes.
#pragma once

#include "hopper/forward/instances.hpp"
#include "hopper/forward/kernel.cuh"

#define FLASH3_FORWARD_INSTANCE(ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND, TILE_N)                       \
  template <>                                                                                      \
  const void* flash3::hopper::forward_kernel_function<flash3::hopper::Element::ELEMENT, HEAD_DIM,  \
                                                      HEAD_DIM_V, BAND, TILE_N>() {                \
    return reinterpret_cast<const void*>(                                                          \
        &forward_kernel<                                                                           \
            ForwardTraits<flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND, TILE_N>>); \
  }

// With a softcap, under any mask.
#define FLASH3_FORWARD_SOFTCAP_INSTANCE(ELEMENT, HEAD_DIM, TILE_N)                                \
  template <>                                                                                     \
  const void*                                                                                     \
  flash3::hopper::forward_kernel_function<flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM,   \
                                          true, TILE_N, flash3::hopper::ScoreKind::kSoftcap>() {  \
    return reinterpret_cast<const void*>(                                                         \
        &forward_kernel<ForwardTraits<flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM, true, \
                                      TILE_N, flash3::hopper::ForwardSchedule{},                  \
                                      flash3::hopper::ScoreKind::kSoftcap>>);                     \
  }
