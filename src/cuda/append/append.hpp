// SPDX-License-Identifier: Apache-2.0
// What a call does before its queries look, in the decode or the forward kernels: one kernel writes
// the new keys and values into the cache, and q with its rotary embedding and its rotation into the
// workspace.
#pragma once

#include <cstddef>

#include "core/plan.hpp"
#include "cuda/host/launches.hpp"

namespace flash3::cuda {

struct AppendPlan {
  int blocks = 0;       // of a sequence, which write its new tokens; 0: none are to be written
  int q_blocks = 0;     // of a sequence, for its queries; 0: q stays as it is
  size_t q_offset = 0;  // into the workspace

  bool launches() const { return blocks + q_blocks > 0; }
};

// *workspace grows by what becomes of q.
AppendPlan plan_append(const ForwardProblem& problem, size_t* workspace);

// q as the attention reads it; no data where the call is only a question.
TensorView transformed_q(const ForwardProblem& problem, const AppendPlan& plan);

// What its kernel is called.
std::string append_name(const ForwardProblem& problem);
void explain_append(const ForwardProblem& problem, const AppendPlan& plan, Explanation* out);
void prepare_append(const ForwardProblem& problem, const AppendPlan& plan, Launches* launches);

}  // namespace flash3::cuda
