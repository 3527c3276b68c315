// SPDX-License-Identifier: Apache-2.0
// The backward on the CPU: exact, tiled, many threads, the same bits on any number of them.
#pragma once

#include <optional>
#include <string>

#include "core/problem.hpp"
#include "cpu/backward_task.hpp"
#include "cpu/target.hpp"

namespace flash3::cpu {

// How one call runs. Made by plan_backward alone, for every question and for the launch.
struct BackwardPlan {
  CpuTarget target = CpuTarget::kBaseline;
  const BackwardKernel* kernel = nullptr;
  TileShape tile;           // the largest
  int threads = 1;          // the most
  int64_t tasks = 0;        // batch × KV heads × blocks of keys; ragged: at most
  size_t scratch_size = 0;  // of one thread
  size_t workspace_size = 0;
  std::string why;
};

// target: the fastest that this machine has, unless a test asks for another. What comes after kAvx3
// is for bfloat16 alone and counts as kAvx3 for other dtypes.
BackwardPlan plan_backward(const BackwardProblem& problem,
                           std::optional<CpuTarget> target = std::nullopt);

// Computes dq, dk, dv and, if it is wanted, dsink. The problem's workspace holds at least
// plan.workspace_size bytes. INVALID_ARGUMENT, and nothing written, if cu_seqlens or
// seqused hold what they must not.
Status run_backward(const BackwardProblem& problem, const BackwardPlan& plan);

}  // namespace flash3::cpu
