// SPDX-License-Identifier: Apache-2.0
// How the forward kernels attend, as a step of a call's route: which kernel, and with what. Nothing
// else decides that. Also what the step says of itself, and its launches.
#pragma once

#include "core/plan.hpp"
#include "cuda/device/tile_schedule.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/sm90/forward/choices.hpp"
#include "cuda/sm90/forward/estimate.hpp"
#include "cuda/sm90/host/packed_copy.hpp"
#include "cuda/varlen/varlen_schedule.hpp"

namespace flash3::cuda::sm90 {

// flush_tiles of a call that never flushes.
inline constexpr int kNeverFlush = 1 << 30;

// Bytes of an element of K and V in memory.
constexpr int key_element_bytes(const ForwardConfig& c) {
  return c.operands == Operands::k16Bit ? 2 : 1;
}

// Bytes of a split's O in the workspace, of its rows' maxima and sums, and how many counters go
// with it (split.cuh).
constexpr int split_out_bytes(const ForwardConfig& c) { return c.tile_m() * c.head_dim_v * 4; }
constexpr int split_sum_bytes(const ForwardConfig& c) { return c.tile_m() * 32; }
constexpr int split_counters(const ForwardConfig& c) { return c.warpgroups + 1; }

// How a split kernel splits keys (device/key_splits.hpp), and where splits lie in the workspace.
struct KeySplitsPlan {
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
  KeySplitsPlan splits;

  // See device/tile_schedule.hpp.
  int m_tiles = 0;
  int groups = 0;
  int groups_at_a_time = 0;
  int tiles = 0;  // a ragged batch has at most so many
  int grid = 0;   // blocks
};

struct EstimatedChoice {
  ForwardChoice choice;  // no kernel: there is none
  Estimate estimate;
};
// Of the choices whose tiles are one head's, of one sequence, the best, and the best of the others;
// with the estimates that they were compared by.
struct BestChoices {
  EstimatedChoice plain, sharing;

  bool any() const { return plain.choice.kernel || sharing.choice.kernel; }
};
BestChoices best_choices(const ForwardProblem& problem, int multiprocessors);

// Plans the better one of the two. In this and what follows q is the problem's own, or what an
// append has made of it; *workspace grows by what the step takes.
Status plan(const ForwardProblem& problem, const TensorView& q, const Device& device,
            const BestChoices& best, size_t* workspace, ForwardPlan* plan);

// Plans this choice, one of forward_choices(problem).
Status plan_choice(const ForwardProblem& problem, const TensorView& q, const Device& device,
                   const ForwardChoice& choice, size_t* workspace, ForwardPlan* plan);

// The kernel, and why it.
void explain_kernel(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out);
// All else.
void explain(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out);

// The copies that the plan asks for, the list of a ragged batch, the kernel.
Status prepare(const ForwardProblem& problem, const TensorView& q, const ForwardPlan& plan,
               Launches* launches);

// If the plan shares tiles, the best choice that does not; otherwise the best that does. Its
// estimate is that of the problem.
EstimatedChoice best_rival(const ForwardProblem& problem, const ForwardPlan& plan);

// The plan's work tiles, in order; without the counter, which belongs to a launch, and the list of
// a ragged batch.
TileSchedule tile_schedule(const ForwardProblem& problem, const ForwardPlan& plan);

// How a ragged batch is listed; without the list's memory.
VarlenScheduleParams varlen_schedule_params(const ForwardProblem& problem, const ForwardPlan& plan);

}  // namespace flash3::cuda::sm90
