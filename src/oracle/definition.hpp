// SPDX-License-Identifier: Apache-2.0
// Attention and its gradients as flash3.h defines them, in float64: plain loops over the parameters
// of the public call. They use nothing of the library but the value of a 16-bit or FP8 element
// (core/convert.hpp), and they are slow. attention_ref.hpp computes the same for thousands of test
// cases, and tests/cpp/cpu/definition_test.cpp holds it against this file.
//
// Internal library flash3_oracle: tests and the command line, not shipped.
#pragma once

#include <map>
#include <string>
#include <vector>

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
};

// The call must be valid, in host memory, and compute in the dtype of its tensors. source: what its
// mask was made of; std::invalid_argument where one of both is given and the other is not.
DefinedForward define_forward(const flash3_forward_params& params,
                              const flash3_mask_params* source = nullptr);
DefinedBackward define_backward(const flash3_backward_params& params,
                                const flash3_mask_params* source = nullptr);

}  // namespace flash3
