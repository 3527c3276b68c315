// SPDX-License-Identifier: Apache-2.0
// The oracle of the backward: gradients in float64, straight from the definition, O(n²), from q, k,
// v, dout and dlse alone. It makes its own forward, so that what out and lse lost when they were
// rounded counts as an error of who uses them. Beside it the plain implementation in the tensors'
// own precision, as oracle/attention_ref.hpp has for the forward.
//
// Internal library flash3_oracle: tests and the command line, not shipped.
#pragma once

#include <vector>

#include "core/problem.hpp"

namespace flash3 {

// Contiguous, in the dimensions that the call's tensors have; rows of ragged batches that no token
// has are 0.
struct ReferenceBackward {
  std::vector<double> dq;     // [batch, seq_q, heads_q, head_dim] or [total_q, heads_q, head_dim]
  std::vector<double> dk;     // likewise
  std::vector<double> dv;     // likewise
  std::vector<double> dsink;  // [heads_q]; empty if there is no sink

  // Error bounds (oracle/error_bound.hpp), as ReferenceForward has them.
  std::vector<float> dq_bound, dk_bound, dv_bound, dsink_bound;
};

// Reads q, k, v, dout, dlse, sink and lengths, and out for the bounds (host memory, any strides);
// nothing of the problem is written. num_threads 0: all cores.
ReferenceBackward attention_backward_ref(const BackwardProblem& problem, int num_threads = 0);

// Writes dq, dk, dv and dsink (host memory). Scores, probabilities and the gradients of both are
// rounded to the problem's dtype as a plain framework implementation does; delta is the row sum of
// dout ∘ out with out as given; sums in float32.
void attention_backward_naive(const BackwardProblem& problem, int num_threads = 0);

}  // namespace flash3
