// SPDX-License-Identifier: Apache-2.0
// A forward call that computes in FP8 from 16-bit tensors (ForwardProblem::quantizes) as the two
// calls that it comes to: one brings q, k and v to FP8 in the workspace, the other runs on those.
#pragma once

#include <cstddef>

#include "core/backend.hpp"

namespace flash3 {

// Both problems use the workspace after the FP8 tensors: they run one after the
// other. Where the call is only a question, their tensors have no memory.
struct QuantizedForward {
  QuantizeProblem quantize;
  ForwardProblem forward;
  size_t tensor_bytes = 0;  // of the FP8 tensors and scales, at the beginning of the workspace
};

// problem.quantizes must be set.
QuantizedForward quantized_forward(const ForwardProblem& problem);

// One plan for both.
Status plan_quantized_forward(const Backend& backend, const ForwardProblem& problem,
                              PlanPointer<ForwardProblem>* plan);

}  // namespace flash3
