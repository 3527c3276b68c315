// SPDX-License-Identifier: Apache-2.0
// What the CPU does to whole rows: flash3_merge, on many threads, and rows of no token.
#pragma once

#include <cstddef>

#include "core/padding.hpp"
#include "core/problem.hpp"

namespace flash3::cpu {

// How one call runs. Made by plan_merge alone.
struct MergePlan {
  int threads = 1;
  size_t workspace_size = 0;
};

MergePlan plan_merge(const MergeProblem& problem);
Status run_merge(const MergeProblem& problem, const MergePlan& plan);

void fill_padding(const Padding& padding);

}  // namespace flash3::cpu
