// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: exact, tiled, online softmax, many threads.
#pragma once

#include <optional>
#include <string>

#include "core/problem.hpp"
#include "cpu/attention_task.hpp"
#include "cpu/target.hpp"

namespace flash3::cpu {

// How one call runs. Made by plan_attention alone, for every question and for the launch.
struct AttentionPlan {
  CpuTarget target = CpuTarget::kBaseline;
  const AttentionKernel* kernel = nullptr;
  TileShape tile;          // the largest
  int threads = 1;         // the most
  int64_t row_blocks = 0;  // of a KV head's packed rows
  int64_t splits = 1;      // parts of the keys; more than one is followed by a merge
  int64_t split_keys = 0;  // keys of a part
  int64_t tasks = 0;       // batch × KV heads × row_blocks × splits; ragged: at most
  size_t q_offset = 0;     // into the workspace: q with its embedding and rotation
  size_t workspace_size = 0;
  std::string why;
};

// target: the best that this machine has for the dtype, unless a test asks for another; kAmx for
// bfloat16 only.
AttentionPlan plan_attention(const ForwardProblem& problem,
                             std::optional<CpuTarget> target = std::nullopt);

// Computes out and, if it has memory, lse. The problem's workspace holds at least
// plan.workspace_size bytes. INVALID_ARGUMENT, and nothing written, if cu_seqlens or seqused hold
// what they must not.
Status run_attention(const ForwardProblem& problem, const AttentionPlan& plan);

}  // namespace flash3::cpu
