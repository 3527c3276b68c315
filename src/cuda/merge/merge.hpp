// SPDX-License-Identifier: Apache-2.0
// Merges results of several, each of a part of the keys: flash3_merge.
#pragma once

#include "core/plan.hpp"
#include "cuda/host/device_info.hpp"

namespace flash3::cuda {

struct MergePlan {
  int grid = 0;                // blocks
  size_t workspace_bytes = 0;  // none
};

Status plan(const MergeProblem& problem, const Device& device, MergePlan* plan);
void explain(const MergeProblem& problem, const MergePlan& plan, Explanation* out);
Status launch(const MergeProblem& problem, const MergePlan& plan);

}  // namespace flash3::cuda
