// SPDX-License-Identifier: Apache-2.0
// Calls on a cache whose sequences differ in their queries: prompts, and sequences that decode
// beside them. Which kernels compute a sequence follows from its own queries, as if it came alone,
// and so do its bits: the decode kernels where they are few, the forward kernels where they are
// not. Each leaves out what is the other's.
#pragma once

#include "cuda/sm90/decode/plan.hpp"
#include "cuda/sm90/forward/plan.hpp"

namespace flash3::cuda::sm90 {

struct MixedPlan {
  ForwardPlan forward;  // what is appended, too
  DecodePlan decode;
  size_t workspace_bytes = 0;  // both have parts of their own
};

// Whether a call that is_decode() denies has, or may have, sequences of both kinds.
bool is_mixed(const ForwardProblem& problem);

Status plan(const ForwardProblem& problem, const Device& device, MixedPlan* plan);
void explain(const ForwardProblem& problem, const MixedPlan& plan, Explanation* out);
// What is appended, the sequences of few queries, and then all others.
Status launch(const ForwardProblem& problem, const MixedPlan& plan);

// That of the decode kernels; the forward's list is made by each call.
ScheduleNeeds schedule_needs(const MixedPlan& plan);
Status make_schedule(const ForwardProblem& problem, const MixedPlan& plan, void* data);

}  // namespace flash3::cuda::sm90
