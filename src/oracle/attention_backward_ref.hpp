// SPDX-License-Identifier: Apache-2.0
// The oracle of the backward: gradients in float64 (definition.hpp) at the speed that thousands of
// test cases need, with their error bounds, from q, k, v, dout and dlse alone. It makes its own
// forward, so that what out and lse lost when they were rounded counts as an error of what uses
// them.
//
// Internal library flash3_oracle: tests and the command line, not shipped.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "oracle/mask_pairs.hpp"

namespace flash3 {

// Contiguous, in the dimensions that the call's tensors have; rows of ragged batches that no token
// has are 0.
struct ReferenceBackward {
  std::vector<double> dq;     // [batch, seq_q, heads_q, head_dim] or [total_q, heads_q, head_dim]
  std::vector<double> dk;     // likewise
  std::vector<double> dv;     // likewise
  std::vector<double> dsink;  // [heads_q]; empty if there is no sink

  // Error bounds (oracle/yardsticks/error_bound.hpp), as ReferenceForward has them.
  std::vector<float> dq_bound, dk_bound, dv_bound, dsink_bound;
};

// Reads q, k, v, dout, dlse, sink and lengths, and out for the bounds (host memory, any strides);
// nothing of the problem is written. num_threads 0: all cores.
// mask: as attention_ref() takes it.
ReferenceBackward attention_backward_ref(const BackwardProblem& problem, int num_threads = 0,
                                         const MaskPairs* mask = nullptr);

}  // namespace flash3
