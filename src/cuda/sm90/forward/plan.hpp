// SPDX-License-Identifier: Apache-2.0
// The plan of a forward call: which kernel runs it, and with what. Nothing else decides that. Also
// its explanation and launch.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "cuda/append/append.hpp"
#include "cuda/device/kinds.hpp"
#include "cuda/device/tile_schedule.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/sm90/forward/config.hpp"
#include "cuda/sm90/forward/estimate.hpp"
#include "cuda/sm90/host/packed_copy.hpp"
#include "cuda/varlen/varlen_schedule.hpp"

namespace flash3::cuda::sm90 {

struct ForwardParams;  // params.h

struct ForwardKernel {
  std::string id;  // "fwd_bf16_d128_band_192x80", "fwd_bf16_d128_softcap_128x128"
  Element element;
  ForwardConfig config;
  const void* function;  // for cudaLaunchKernel
};

// Every kernel built in, in the order of the tile table.
std::span<const ForwardKernel> forward_kernels();

// One way to run a problem: which kernel, and how many query heads of a KV head, or how many rows
// of short ragged sequences, share a tile.
struct ForwardChoice {
  const ForwardKernel* kernel = nullptr;
  HeadPack pack;
  int slot_rows = 0;  // TileSchedule

  bool shares_tiles() const { return pack.heads > 1 || slot_rows > 0; }
};

// All ways that give the right answer. They are the kernels of the narrowest head dims that hold
// the call's; each with one head a tile, with heads packed by every divisor of the heads per KV
// head that fits a warpgroup's rows (in FP8 on a cache alone), and with slots where max_seqlen is
// small enough. Empty if no kernel takes the dtype or the head dims.
std::vector<ForwardChoice> forward_choices(const ForwardProblem& problem);

// FP8 sums up O in two levels where a query may see more keys, unless the call says otherwise.
inline constexpr int64_t kLongRow = 2048;

// How a split kernel splits keys (device/key_parts.hpp), and where parts lie in the workspace.
struct KeyPartsPlan {
  int most = 1;       // of a work tile
  int slot_bits = 0;  // there are 2^slot_bits slots
  size_t out_offset = 0, sums_offset = 0, counters_offset = 0;
};

struct ForwardPlan {
  const ForwardKernel* kernel = nullptr;
  HeadPack pack;
  int slot_rows = 0;
  Estimate estimate;        // what it is expected to cost
  int multiprocessors = 0;  // of the device that it is for

  AppendPlan append;      // what is written into the cache first
  int least_queries = 0;  // shorter sequences of a ragged batch are left out
  RowIndexing rows = RowIndexing::kBySequence;
  int box_keys = 0;  // rows of K and V that TMA loads at once
  PackedCopy q, k, v;
  bool out_by_tma = false;
  int flush_tiles = kNeverFlush;  // FP8: key tiles between two flushes of O (output_sums.cuh)
  size_t sums_offset = 0;         // where O is flushed to in the workspace, if not in shared memory
  bool dynamic = false;           // blocks take tiles from a counter in the workspace
  size_t counter_offset = 0;
  size_t list_offset = 0, first_tile_offset = 0;  // of a ragged batch: SequenceList
  KeyPartsPlan parts;
  size_t workspace_bytes = 0;

  // See device/tile_schedule.hpp.
  int m_tiles = 0;
  int groups = 0;
  int groups_at_a_time = 0;
  int tiles = 0;  // a ragged batch has at most so many
  int grid = 0;   // blocks
};

// Says why no forward kernel reads the problem's cache; empty if one does.
std::string why_not_from_cache(const ForwardProblem& problem);

// Plans the choice that is expected to be the fastest.
Status plan(const ForwardProblem& problem, const Device& device, ForwardPlan* plan);

// Plans this choice, one of forward_choices(problem).
Status plan_choice(const ForwardProblem& problem, const Device& device, const ForwardChoice& choice,
                   ForwardPlan* plan);

void explain(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out);

// Enqueues the call on the problem's stream: the append, the copies that the plan asks for, the
// list of a ragged batch, the kernel.
Status launch(const ForwardProblem& problem, const ForwardPlan& plan);
// The same without the append, in two steps: what can fail before anything is enqueued, and the
// rest.
Status launch_attention(const ForwardProblem& problem, const ForwardPlan& plan);
Status prepare_attention(const ForwardProblem& problem, const ForwardPlan& plan,
                         ForwardParams* params);
Status launch_prepared(const ForwardProblem& problem, const ForwardPlan& plan,
                       ForwardParams* params);

// If the plan shares tiles, the best choice that does not; otherwise the best that does. No kernel:
// there is none.
struct ForwardRival {
  ForwardChoice choice;
  Estimate estimate;
};
ForwardRival best_rival(const ForwardProblem& problem, const ForwardPlan& plan);

// The plan's work tiles, in order; without the counter, which belongs to a launch, and the list of
// a ragged batch.
TileSchedule tile_schedule(const ForwardProblem& problem, const ForwardPlan& plan);

// How a ragged batch is listed; without the list's memory.
VarlenScheduleParams varlen_schedule_params(const ForwardProblem& problem, const ForwardPlan& plan);

}  // namespace flash3::cuda::sm90
