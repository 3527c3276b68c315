// SPDX-License-Identifier: Apache-2.0
// Merges results of several, each of a part of the keys: flash3_merge.
#pragma once

#include <cstdint>

#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/device/types.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"

namespace flash3::cuda {

// ---- what the merge kernel is launched with ----

inline constexpr int kMergeThreads = 128;
inline constexpr int kMergeColumns = 4;  // of a row, that a thread has at once

struct MergeParams {
  const float* parts;
  long long part_stride, part_stride_row, part_stride_head;
  const float* lse_parts;
  long long lse_part_stride, lse_part_stride_head;
  void* out;
  long long out_stride_row, out_stride_head;
  FloatType type;
  float* lse;  // or null
  long long lse_stride_head;
  SinkRow sink;
  long long rows;
  int heads, count, dim;              // count: of the parts
  bool parts_in_quads, out_in_quads;  // rows of aligned groups of four
};

const void* merge_function();

// ---- the plan ----

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
