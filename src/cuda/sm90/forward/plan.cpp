// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward/plan.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <optional>

#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "cuda/device/key_splits.hpp"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {
namespace {

// FP8 sums a row of more than kLongRow keys in two levels, and flushes O every kFlushedKeys keys:
// one level alone loses 1.6 % of 1024 equal weights, and 13 % of 8192 (docs/fp8.md). Wide heads
// have more sums, in the workspace: a flush takes as long as several key tiles, and is rarer.
constexpr int64_t kFlushedKeys = 1024, kFlushedWideKeys = 4096;

// A call has no more tiles than this, whatever the lengths.
int64_t most_tiles(const ForwardProblem& problem, int64_t tile_queries, int64_t groups) {
  const Sequences& q = problem.sequences_q;
  const int64_t of_each = problem.batch * ceil_div(problem.seq_q, tile_queries);
  return groups *
         (q.packed ? std::min(of_each, int64_t(q.rows) / tile_queries + problem.batch) : of_each);
}

// Plans what a ragged batch needs besides.
void plan_ragged(const ForwardProblem& problem, size_t* workspace, ForwardPlan* plan) {
  plan->list_offset = reserve_workspace(size_t(problem.batch) * sizeof(ListedSequence), workspace);
  if (plan->slot_rows == 0)
    plan->first_tile_offset =
        reserve_workspace((size_t(problem.batch) + 1) * sizeof(int), workspace);
}

// Plans the splits of a split kernel; *tiles: of work, which become splits. Slots for two rounds of
// blocks let none wait for another. Where no sequence can have keys for two splits there are none.
void plan_splits(const ForwardProblem& problem, int64_t tiles_of_sequence, int blocks,
                 const ForwardConfig& config, int64_t* tiles, size_t* workspace,
                 ForwardPlan* plan) {
  KeySplitsPlan& splits = plan->splits;
  splits.most = int(
      std::clamp<int64_t>(problem.seq_k / kLeastSplitKeys, 1, most_key_splits(tiles_of_sequence)));
  if (splits.most == 1) return;
  *tiles *= splits.most;
  const auto rounds = uint64_t(std::max(2 * blocks, 2 * kMostKeySplits));
  const uint64_t slots = std::min(std::bit_ceil(uint64_t(*tiles)), std::bit_floor(rounds));
  splits.slot_bits = int(std::bit_width(slots)) - 1;
  const auto reserve = [&](int bytes) {
    return reserve_workspace(size_t(slots) * size_t(bytes), workspace);
  };
  splits.out_offset = reserve(split_out_bytes(config));
  splits.sums_offset = reserve(split_sum_bytes(config));
  splits.counters_offset = reserve(split_counters(config) * int(sizeof(int)));
}

Estimate estimate_choice(const ForwardProblem& problem, int multiprocessors,
                         const ForwardChoice& choice) {
  return estimate_forward(problem, choice.kernel->config, choice.pack, choice.slot_rows,
                          multiprocessors);
}

// The call whose estimates choices are compared by. It has not the batch of a ragged call, so that
// a sequence has the same bits whatever is beside it. Nor has it the bound of a cache's keys: a
// page table is often as wide as the longest sequence needs.
ForwardProblem typical_call(const ForwardProblem& problem) {
  ForwardProblem typical = problem;
  typical.batch = 1024;
  if (!problem.has_cache()) return typical;
  constexpr int64_t kTypicalKeys = 16384;
  typical.seq_k =
      problem.sequences_q.bounded ? std::max(kTypicalKeys, problem.seq_q) : kTypicalKeys;
  typical.sequences_k.bounded = true;
  return typical;
}

// Besides lengths, heads and tiles, kernels count sizes up to this one in 32 bits.
int64_t largest_count(const ForwardProblem& problem) {
  const auto rows_of = [&](const Sequences& s, int64_t rows) {
    return s.packed ? int64_t{s.rows} : problem.batch * rows;
  };
  const int64_t rows_q = rows_of(problem.sequences_q, problem.seq_q);
  if (!problem.has_cache()) return std::max(rows_q, rows_of(problem.sequences_k, problem.seq_k));
  return std::max({rows_q, problem.k.batch * problem.k.seq, problem.batch,
                   int64_t{problem.append.sequences.rows},
                   problem.heads_q * (problem.append.given || problem.rotates ? kMaxHeadDim : 1)});
}

// Plans how tensors are read and written, with the copies that TMA needs.
void plan_tensors(const ForwardProblem& problem, const TensorView& given_q, size_t* workspace,
                  ForwardPlan* plan) {
  const ForwardConfig& config = plan->kernel->config;
  plan->rows = indexing_of(problem);
  plan->box_keys = plan->slot_rows > 0 ? plan->slot_rows
                   : config.paged      ? cache_box_rows(problem.cache, rows_at_once(config))
                                       : config.tile_n;
  const auto copy_of = [&](const TensorView& view, const Sequences& sequences, int element_bytes) {
    return plan_copy(tensor_rows(view, sequences), plan->rows, workspace, element_bytes);
  };
  plan->q = copy_of(given_q, problem.sequences_q, config.element_bytes());
  plan->k = copy_of(problem.k, problem.sequences_k, key_element_bytes(config));
  plan->v = copy_of(problem.v, problem.sequences_k, key_element_bytes(config));
  // TMA stores rows in pieces of 16 bytes: one that ends in between would write past its end.
  plan->out_by_tma = !config.fp8() && problem.out_dtype == problem.dtype &&
                     tma_can_address(tensor_rows(problem.out, problem.sequences_q), plan->rows) &&
                     problem.head_dim_v % 8 == 0;
}

Status check_counts(const ForwardProblem& problem, int slot_rows, int64_t tiles) {
  const int64_t rows = std::max(largest_count(problem), problem.batch * int64_t{slot_rows});
  if (std::max({problem.seq_q, problem.seq_k, problem.heads_q, tiles}) <= kMostCounted &&
      !(problem.is_ragged() && rows > kMostCounted))
    return {};
  return unsupported(
      message("seq_q = ", problem.seq_q, ", seq_k = ", problem.seq_k,
              ", heads_q = ", problem.heads_q, ", ", tiles, " tiles of work, and up to ", rows,
              " rows of a ragged batch or a cache, but the hopper backend counts each up to ",
              kMostCounted));
}

// Plans how often FP8 flushes O.
void plan_sums(const ForwardProblem& problem, size_t* workspace, ForwardPlan* plan) {
  const ForwardConfig& config = plan->kernel->config;
  if (!config.two_level || !sums_in_two_levels(problem)) return;
  const bool is_wide = config.head_dim_v > 128;
  // A power of two, of tiles of two thirds to four thirds of the keys.
  plan->flush_tiles = int(std::bit_floor(
      uint64_t((is_wide ? kFlushedWideKeys : kFlushedKeys) * 3 / 2 / config.tile_n)));
  if (!sums_in_shared(config))
    plan->sums_offset = reserve_workspace(size_t(plan->grid) * config.sums_bytes(), workspace);
}

// Plans in which order blocks take tiles, of which slots need none.
void plan_order(const ForwardProblem& problem, size_t* workspace, ForwardPlan* plan) {
  const ForwardConfig& config = plan->kernel->config;
  // Tiles of equal length need no counter, nor does a single round of them.
  const bool tiles_differ = config.band || config.lists;
  plan->dynamic = (tiles_differ || problem.is_ragged()) && plan->tiles > plan->grid;
  if (plan->dynamic) plan->counter_offset = reserve_workspace(sizeof(TileCounterMemory), workspace);
  if (!tiles_differ) return;
  const int64_t kv_bytes = std::max<int64_t>(
      1, problem.seq_k * (problem.head_dim + problem.head_dim_v) * key_element_bytes(config));
  const int64_t at_a_time = std::max<int64_t>(1, kL2Budget / kv_bytes) *
                            (problem.queries_per_kv_head() / plan->pack.heads);
  plan->groups_at_a_time = int(std::min<int64_t>(at_a_time, plan->groups));
}

}  // namespace

BestChoices best_choices(const ForwardProblem& problem, int multiprocessors) {
  std::optional<ForwardProblem> typical;
  if (problem.is_ragged()) typical = typical_call(problem);
  const ForwardProblem& compared = typical ? *typical : problem;
  BestChoices best;
  const auto compare = [&](const ForwardChoice& choice) {
    EstimatedChoice& own = choice.shares_tiles() ? best.sharing : best.plain;
    const Estimate estimate = estimate_choice(compared, multiprocessors, choice);
    if (!own.choice.kernel || is_better(estimate, own.estimate, kRowMargin))
      own = {choice, estimate};
  };
  for_each_choice(problem, std::ref(compare));  // by reference: nothing is allocated
  return best;
}

Status plan(const ForwardProblem& problem, const TensorView& q, const Device& device,
            const BestChoices& best, size_t* workspace, ForwardPlan* plan) {
  if (!takes(problem.dtype)) {
    return unsupported(
        message("q.dtype = ", dtype_name(problem.dtype),
                " but the hopper backend computes in float16, bfloat16 and float8_e4m3 only"));
  }
  FLASH3_CHECK(check_softcap(problem));
  if (!best.plain.choice.kernel) {
    return unsupported(message("no kernel for head_dim = ", problem.head_dim,
                               ", head_dim_v = ", problem.head_dim_v));
  }
  const bool shares = best.sharing.choice.kernel &&
                      is_better(best.sharing.estimate, best.plain.estimate, kPackMargin);
  return plan_choice(problem, q, device, (shares ? best.sharing : best.plain).choice, workspace,
                     plan);
}

Status plan_choice(const ForwardProblem& problem, const TensorView& q, const Device& device,
                   const ForwardChoice& choice, size_t* workspace, ForwardPlan* plan) {
  *plan = {};
  plan->kernel = choice.kernel;
  plan->pack = choice.pack;
  plan->slot_rows = choice.slot_rows;
  plan->estimate = estimate_choice(problem, device.multiprocessors, choice);
  plan->multiprocessors = device.multiprocessors;
  plan_tensors(problem, q, workspace, plan);

  const ForwardConfig& config = choice.kernel->config;
  const int64_t head_groups = problem.heads_q / choice.pack.heads;
  const int64_t tile_queries = int64_t{config.warpgroups} * choice.pack.queries;
  int64_t tiles = problem.is_ragged() && choice.slot_rows == 0
                      ? most_tiles(problem, tile_queries, head_groups)
                      : plan->estimate.tiles;
  const int blocks = std::max(1, device.multiprocessors - problem.sm_margin);
  if (config.split)
    plan_splits(problem, ceil_div(problem.seq_q, tile_queries) * head_groups, blocks, config,
                &tiles, workspace, plan);
  FLASH3_CHECK(check_counts(problem, choice.slot_rows, tiles));
  plan->tiles = int(tiles);
  plan->grid = std::min(plan->tiles, blocks);
  plan->m_tiles = int(plan->estimate.m_tiles);
  plan->groups = int((choice.slot_rows > 0 ? 1 : problem.batch) * head_groups);
  plan->groups_at_a_time = choice.slot_rows > 0 ? plan->groups : 1;
  plan_sums(problem, workspace, plan);
  if (problem.is_ragged()) plan_ragged(problem, workspace, plan);
  if (choice.slot_rows == 0) plan_order(problem, workspace, plan);
  return {};
}

EstimatedChoice best_rival(const ForwardProblem& problem, const ForwardPlan& plan) {
  const BestChoices best = best_choices(problem, plan.multiprocessors);
  const bool shares = plan.pack.heads > 1 || plan.slot_rows > 0;
  const ForwardChoice& choice = (shares ? best.plain : best.sharing).choice;
  if (!choice.kernel) return {};
  return {choice, estimate_choice(problem, plan.multiprocessors, choice)};
}

TileSchedule tile_schedule(const ForwardProblem& problem, const ForwardPlan& plan) {
  TileSchedule schedule{};
  schedule.rule = tile_mask_rule(problem.mask_rule);
  schedule.seq_q = int(problem.seq_q);
  schedule.seq_k = int(problem.seq_k);
  schedule.mask = TileMask::make(schedule.seq_q, schedule.seq_k, schedule.rule);
  schedule.slot_rows = plan.slot_rows;
  if (plan.slot_rows > 0) {
    schedule.seq_q = schedule.seq_k = int(problem.batch) * plan.slot_rows;
    schedule.mask = {};
    schedule.mask.chunk = plan.slot_rows;
  }
  schedule.tile_queries = plan.kernel->config.warpgroups * plan.pack.queries;
  schedule.m_tiles = plan.m_tiles;
  schedule.head_groups = int(problem.heads_q) / plan.pack.heads;
  schedule.groups = plan.groups;
  schedule.groups_at_a_time = plan.groups_at_a_time;
  schedule.tiles = plan.tiles;
  schedule.may_hide_keys = may_hide_keys(problem);
  return schedule;
}

VarlenScheduleParams varlen_schedule_params(const ForwardProblem& problem,
                                            const ForwardPlan& plan) {
  VarlenScheduleParams list{};
  list.q = problem.sequences_q;
  list.k = problem.sequences_k;
  list.cache = problem.cache;
  if (problem.append.given) list.added = problem.append.sequences;
  list.batch = int(problem.batch);
  list.least_queries = plan.least_queries;
  list.in_order = plan.slot_rows > 0;
  list.tile_rows = plan.kernel->config.warpgroups * plan.pack.queries;
  list.groups = int(problem.heads_q) / plan.pack.heads;
  list.most_splits = plan.splits.most;
  if (plan.splits.most > 1)
    list.counter_count = split_counters(plan.kernel->config) << plan.splits.slot_bits;
  if (plan.kernel->config.band) {
    list.bytes_at_a_time = kL2Budget;
    list.bytes_per_row =
        Index{problem.head_dim + problem.head_dim_v} * key_element_bytes(plan.kernel->config);
    list.group_step = int(problem.queries_per_kv_head()) / plan.pack.heads;
  }
  return list;
}

}  // namespace flash3::cuda::sm90
