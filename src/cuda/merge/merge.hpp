// SPDX-License-Identifier: Apache-2.0
// Merges results of several, each of a part of the keys: flash3_merge.
#pragma once

#include "core/plan.hpp"
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

}  // namespace flash3::cuda
