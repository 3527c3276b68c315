// SPDX-License-Identifier: Apache-2.0
// The oracle: attention in float64, straight from the definition, O(n²), and for each element how
// far a right implementation may lie from it. Every test leans on it, so it is written to be
// obviously right. Beside it the plain implementation in the tensors' own precision, whose root
// mean square error is the yardstick of the accuracy experiment.
//
// These are the internal library flash3_oracle (tests and the command line), not part of the
// shipped one.
#pragma once

#include <vector>

#include "core/problem.hpp"

namespace flash3 {

// Contiguous, in the dimensions that the call's tensors have; rows of ragged batches that no token
// has are 0.
struct ReferenceForward {
  std::vector<double> out;  // [batch, seq_q, heads_q, head_dim_v] or [total_q, heads_q, head_dim_v]
  std::vector<double> lse;  // [batch, heads_q, seq_q] or [heads_q, total_q]; −∞ (or the sink) for a
                            // row that sees no key

  // Error bounds (oracle/error_bound.hpp) for the dtypes and the backend of the problem; without a
  // backend those of the CPU. In FP8 that of out is of root mean squares.
  std::vector<float> out_bound, lse_bound;
};

// Reads q, k, v, sink and lengths (host memory, any strides); out and lse of the problem are not
// touched. num_threads 0: all cores.
ReferenceForward attention_ref(const ForwardProblem& problem, int num_threads = 0);

// Writes problem.out and, if it has memory, problem.lse (host memory): scores and probabilities are
// materialised in the problem's dtype as a plain framework implementation does; sums in float32. Of
// FP8 problems, the weights alone (fp8_softmax in reference_math.hpp).
// Multi-threaded: also the baseline of the CPU benchmark.
void attention_naive(const ForwardProblem& problem, int num_threads = 0);

// The same of an FP8 problem, but with probabilities rounded to e4m3 as they are: what a framework
// would do. (attention_naive rounds exp(score − max) · 256, as the library does.)
void attention_plain_fp8(const ForwardProblem& problem, int num_threads = 0);

}  // namespace flash3
