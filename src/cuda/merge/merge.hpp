// SPDX-License-Identifier: Apache-2.0
// Merges results of several, each of a part of the keys: flash3_merge.
#pragma once

#include <cstdint>

#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"

namespace flash3::cuda {

struct MergePlan {
  int grid = 0;  // blocks
};

// The steps of a Route.
Status plan(const MergeProblem& problem, const Device& device, size_t* workspace, MergePlan* plan);
void explain(const MergeProblem& problem, const MergePlan& plan, Explanation* out);
Status prepare(const MergeProblem& problem, const MergePlan& plan, Launches* launches);

// The kernel after those of a call with max_logits of heads: Backend::max_of_rows().
Status launch_max_of_rows(const LseView& rows, int64_t count, int64_t heads, const LseView& out,
                          void* stream);

}  // namespace flash3::cuda
