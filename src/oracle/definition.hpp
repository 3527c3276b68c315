// SPDX-License-Identifier: Apache-2.0
// Attention and its gradients as flash3.h defines them, in float64: plain loops over the parameters
// of the public call. They use nothing of the library but the value of a 16-bit or FP8 element
// (core/convert.hpp), and they are slow. attention_ref.hpp computes the same for thousands of test
// cases, and tests/cpp/cpu/definition_test.cpp holds it against this file. Below, flash3_quantize.
//
// Internal library flash3_oracle: tests and the command line, not shipped.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "flash3/flash3.h"
#include "flash3/mask.h"

namespace flash3 {

// Contiguous, in the dimensions that the call's tensors have; rows that belong to no token are 0.
struct DefinedForward {
  std::vector<double> out, lse;
  // What else is wanted, by its field's name; of rows of no token a max_logits is −∞.
  std::map<std::string, std::vector<double>> added;
};
struct DefinedBackward {
  std::vector<double> dq, dk, dv;
  std::vector<double> dsink;  // empty without a sink
  // What else is wanted, by its field's name: of dbias, dbias_table and dalibi_slopes those given.
  std::map<std::string, std::vector<double>> added;
};

// The call must be valid, in host memory, and compute in the dtype of its tensors. source: what its
// mask was made of; std::invalid_argument where one of both is given and the other is not.
DefinedForward define_forward(const flash3_forward_params& params,
                              const flash3_mask_params* source = nullptr);
DefinedBackward define_backward(const flash3_backward_params& params,
                                const flash3_mask_params* source = nullptr);

// What flash3_quantize is held against: the same from its definition, in float64, and e4m3 from the
// list of its values. Host memory. Internal, as attention_ref.hpp.

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
