// SPDX-License-Identifier: Apache-2.0
// What flash3_quantize is held against: the same from its definition, in float64, and e4m3 from the
// list of its values. Host memory. Internal, as attention_ref.hpp.
#pragma once

#include <vector>

#include "core/problem.hpp"

namespace flash3 {

// One of q, k and v.
struct ReferenceQuantized {
  // After rotary embedding and rotation, not scaled: contiguous [batch, seq, heads, dim] or [total,
  // heads, dim]; 0 in rows of no token that counts.
  std::vector<double> values;
  // For each element of the scale tensor, by its offset there: the largest size of what it is for,
  // infinity where that is not finite; −1 where no block is.
  std::vector<double> amax;
};

enum class QuantizeWhich { kQ, kK, kV };

ReferenceQuantized quantize_values_ref(const QuantizeProblem& problem, QuantizeWhich which);

// The scale for an amax, and the code for a value that is divided by its scale.
double scale_ref(double amax);
unsigned char e4m3_code_ref(double x);

// Half of the distance between the e4m3 values around x: no rounding errs by more.
double e4m3_half_step(double x);

// Writes what the call is to write.
void quantize_ref(const QuantizeProblem& problem);

}  // namespace flash3
