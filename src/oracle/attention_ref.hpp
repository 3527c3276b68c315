// SPDX-License-Identifier: Apache-2.0
// The oracle: attention in float64 (definition.hpp) at the speed that thousands of test cases need,
// and for each element how far a right implementation may lie from it. It works on groups of rows,
// and shares no mask with the library.
//
// Internal library flash3_oracle: tests and the command line, not shipped.
#pragma once

#include <map>
#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "oracle/mask_pairs.hpp"

namespace flash3 {

// A further result, and how far each element may lie from it. Where it is NaN any value is right.
struct ReferenceValues {
  std::vector<double> values;
  std::vector<float> bound;
};

// Contiguous, in the dimensions that the call's tensors have; rows of ragged batches that no token
// has are 0, and of a further result what fill_padding makes of them.
struct ReferenceForward {
  std::vector<double> out;  // [batch, seq_q, heads_q, head_dim_v] or [total_q, heads_q, head_dim_v]
  std::vector<double> lse;  // [batch, heads_q, seq_q] or [heads_q, total_q]; −∞ (or the sink) for a
                            // row that sees no key

  // Error bounds (oracle/yardsticks/yardsticks.hpp) for the dtypes and the backend of the problem;
  // without a backend those of the CPU. In FP8 that of out is of root mean squares.
  std::vector<float> out_bound, lse_bound;

  // What else the call writes, by the name of its field in flash3_forward_params.
  std::map<std::string_view, ReferenceValues> added = {};
};

// Reads q, k, v, sink, lengths and what belongs to a cache (host memory, any strides); out, lse and
// the cache of the problem are not touched. num_threads 0: all cores. mask: what the call's mask,
// if it has one, was made from; its lists are not read.
ReferenceForward attention_ref(const ForwardProblem& problem, int num_threads = 0,
                               const MaskPairs* mask = nullptr);

// The oracle of the backward: gradients in float64 (definition.hpp) at the speed that thousands of
// test cases need, with their error bounds, from q, k, v, dout and dlse alone. It makes its own
// forward, so that what out and lse lost when they were rounded counts as an error of what uses
// them.

// Contiguous, in the dimensions that the call's tensors have; rows of ragged batches that no token
// has are 0.
struct ReferenceBackward {
  std::vector<double> dq;     // [batch, seq_q, heads_q, head_dim] or [total_q, heads_q, head_dim]
  std::vector<double> dk;     // likewise
  std::vector<double> dv;     // likewise
  std::vector<double> dsink;  // [heads_q]; empty if there is no sink

  // Error bounds (oracle/yardsticks/yardsticks.hpp), as ReferenceForward has them.
  std::vector<float> dq_bound, dk_bound, dv_bound, dsink_bound;

  // What else the call writes, by the name of its field in flash3_backward_params.
  std::map<std::string_view, ReferenceValues> added = {};
};

// Reads q, k, v, dout, dlse, sink and lengths, and out for the bounds (host memory, any strides);
// nothing of the problem is written. num_threads 0: all cores.
// mask: as attention_ref() takes it.
ReferenceBackward attention_backward_ref(const BackwardProblem& problem, int num_threads = 0,
                                         const MaskPairs* mask = nullptr);

}  // namespace flash3
