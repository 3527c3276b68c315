// SPDX-License-Identifier: Apache-2.0
// Which kernels run a backward call, and with what: the one place that decides, what it says of
// itself, and its launches.
#pragma once

#include <span>
#include <string>

#include "core/plan.hpp"
#include "cuda/device/types.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/sm90/backward/bias_gradient.hpp"
#include "cuda/sm90/backward/limits.hpp"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/host/packed_copy.hpp"
#include "cuda/varlen/varlen_schedule.hpp"

namespace flash3::cuda::sm90 {

struct BackwardKernel {
  std::string id;  // "bwd_bf16_d128_band_64x128"
  Element element;
  BackwardConfig config;
  const void* function;  // for cudaLaunchKernel
};

// Every kernel built in, in the order of the tile table.
std::span<const BackwardKernel> backward_kernels();

struct BackwardPlan {
  const BackwardKernel* kernel = nullptr;

  RowIndexing rows = RowIndexing::kBySequence;
  PackedCopy q, k, v, dout;
  bool dk_by_tma = false, dv_by_tma = false;

  // Offsets into the workspace; see BackwardWorkspace in params.h.
  size_t lse_offset = 0, delta_offset = 0, dq_offset = 0;
  size_t semaphores_offset = 0;                   // only if counted
  size_t ticket_offset = 0;                       // only if has_ticket()
  size_t list_offset = 0, first_tile_offset = 0;  // of a ragged batch: SequenceList

  // See KeySchedule in params.h.
  QueryTiles query_tiles{};
  int n_tiles = 0;   // of sequences of one length, as the next
  int kv_heads = 0;  // batch · heads_k
  int kv_heads_at_a_time = 1;
  int tiles_at_a_time = 0;  // deterministic: how many run at the same time
  int key_tiles = 0;        // of all KV heads; of a ragged batch no fewer than there can be
  int grid = 0;             // blocks: one for each tile of keys, or persistent

  bool deterministic = false;  // blocks add to dQ in the order of dq_order()
  bool zeroed = false;         // dQ is zero-initialised; otherwise the first block stores
  bool counted = false;        // semaphores count the blocks that add to dQ

  BiasGradientPlan bias;
  bool stores_dbias = false;  // tiles of dS are dbias; otherwise bias has it, if it is wanted

  // Blocks take their key tiles by a ticket, in their order.
  bool has_ticket() const { return deterministic || kernel->config.persistent; }
};

// The steps of a Route.
Status plan(const BackwardProblem& problem, const Device& device, size_t* workspace,
            BackwardPlan* plan);
void explain(const BackwardProblem& problem, const BackwardPlan& plan, Explanation* out);
Status prepare(const BackwardProblem& problem, const BackwardPlan& plan, Launches* launches);

// The plan's blocks, in order; without the list of a ragged batch, which belongs to a launch.
KeySchedule key_schedule(const BackwardProblem& problem, const BackwardPlan& plan);

// How a ragged batch is listed; without the list's memory.
VarlenScheduleParams varlen_schedule_params(const BackwardProblem& problem,
                                            const BackwardPlan& plan);

}  // namespace flash3::cuda::sm90
