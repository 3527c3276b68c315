// SPDX-License-Identifier: Apache-2.0
// A case of flash3_quantize. Where nothing is rotated, scales and codes must be those of the
// reference bit for bit. Where rotary embeddings or the rotation come first, their float32 sums may
// be those of any order: a code may err by half a step and a little, and a scale be its neighbour
// where the largest element lies at its limit.
#pragma once

#include "cases/runner.hpp"

namespace flash3::cases {

// What run_case does with it. The checks of q, k and v hold the largest error beside the largest
// size that the scale is for.
CheckResult run_quantize_case(const Case& c, Memory& memory, const RunOptions& options);

// The call of such a case without data, for questions.
flash3_quantize_params make_quantize_question(const Case& c);

}  // namespace flash3::cases
