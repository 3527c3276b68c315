// SPDX-License-Identifier: Apache-2.0
// flash3_merge on the CPU: many threads, rows after rows.
#pragma once

#include <cstddef>

#include "core/problem.hpp"

namespace flash3::cpu {

// How one call runs. Made by plan_merge alone.
struct MergePlan {
  int threads = 1;
  size_t workspace_size = 0;
};

MergePlan plan_merge(const MergeProblem& problem);
Status run_merge(const MergeProblem& problem, const MergePlan& plan);

}  // namespace flash3::cpu
