// SPDX-License-Identifier: Apache-2.0
// The kernels' addresses: one explicit instance per file in instances/, so that files compile in
// parallel and in seconds.
#pragma once

#include "hopper/device/element.hpp"
#include "hopper/device/score_kind.hpp"

namespace flash3::hopper {

template <Element kElement, int kHeadDim, int kHeadDimV, bool kBand, int kTileM,
          ScoreKind kScore = ScoreKind::kPlain>
const void* backward_kernel_function();

}  // namespace flash3::hopper
