// SPDX-License-Identifier: Apache-2.0
// Which kernel families run a forward call: the only place that decides it, and the steps that
// follow.
#pragma once

#include <optional>

#include "cuda/append/append.hpp"
#include "cuda/sm90/decode/plan.hpp"
#include "cuda/sm90/forward/plan.hpp"

namespace flash3::cuda::sm90 {

// In the order in which they run. Where the sequences of a call on a cache differ in their queries,
// prompts and sequences that decode beside them, there are both kinds of attention. Which kernels
// compute a sequence follows from its own queries, as if it came alone, and so do its bits: the
// decode kernels where they are few, the forward kernels where they are not. Each leaves out what
// is the other's.
struct ForwardSteps {
  AppendPlan append;
  std::optional<DecodePlan> decode;
  std::optional<ForwardPlan> forward;
};

// As cuda/host/route.hpp has them.
Status plan(const ForwardProblem& problem, const Device& device, size_t* workspace,
            ForwardSteps* steps);
void explain(const ForwardProblem& problem, const ForwardSteps& steps, Explanation* out);
Status prepare(const ForwardProblem& problem, const ForwardSteps& steps, Launches* launches);

// That of the decode kernels; the forward's list is made by each call.
ScheduleNeeds needs_of(const ForwardSteps& steps);
void prepare_schedule(const ForwardProblem& problem, const ForwardSteps& steps, void* data,
                      Launches* launches);

}  // namespace flash3::cuda::sm90
