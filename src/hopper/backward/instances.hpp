// SPDX-License-Identifier: Apache-2.0
// The kernels' addresses: one explicit instance a generated file (cmake/kernel_instances.cmake), so
// that files compile in parallel and in seconds.
#pragma once

#include "hopper/device/kinds.hpp"

namespace flash3::hopper {

template <Element kElement, int kHeadDim, int kHeadDimV, bool kBand, ScoreKind kScore, int kTileM,
          int kTileN>
const void* backward_kernel_function();

}  // namespace flash3::hopper

// The one line of a generated file, behind instance.cuh or instance_wide.cuh.
// Template arguments take no parentheses. NOLINTBEGIN(bugprone-macro-parentheses)
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
// NOLINTEND(bugprone-macro-parentheses)
