// SPDX-License-Identifier: Apache-2.0
// The schedule kernel: it decides which block of the decode kernel computes which splits of which
// items, and what is then to be merged. It runs on the device, where the lengths lie, so that a
// captured graph replays with others. Each block cuts the same axis of cost (work.hpp) and writes
// its own runs.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/sm90/decode/block_splits.hpp"
#include "cuda/sm90/decode/config.hpp"
#include "cuda/sm90/decode/params.h"

namespace flash3::cuda::sm90 {

inline constexpr int kScheduleThreads = 256;

// Where a block's work begins and ends.
struct BlockPlaces {
  DecodePlace at[2];  // begin, end
  DecodeCut cut;
  int items;  // all sequences' items for one group of heads
  uint64_t warp_sums[8];
};

// A run, and where its item lies.
struct ItemRun {
  DecodeRun run;
  DecodeCost at, cost;         // the item's place on the axis of cost
  int split_begin, split_end;  // the sequence's
};

// Costs and items are summed up together, packed into 64 bits.
struct CostAndItems {
  DecodeCost cost;
  unsigned items;

  __device__ __forceinline__ static CostAndItems of(uint64_t packed) {
    return {DecodeCost(packed), unsigned(packed >> 32)};
  }
  __device__ __forceinline__ uint64_t packed() const { return uint64_t(items) << 32 | cost; }
};

// Returns the sum over the threads before this one; *all is that over all threads. All threads call
// it.
__device__ __forceinline__ uint64_t sum_before(uint64_t x, uint64_t (&warp_sums)[8],
                                               uint64_t* all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  uint64_t before = sum - x;
  *all = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    if (w < warp) before += warp_sums[w];
    *all += warp_sums[w];
  }
  return before;
}

// Finds where the block's work begins and ends. All threads of the block call it; it ends with a
// barrier.
__device__ __forceinline__ void find_work(const DecodeScheduleParams& params, BlockPlaces& places) {
  const bool one_chunk = params.batch <= kScheduleThreads;
  DecodeSequence s{};
  CostAndItems own{}, before{};
  DecodeCost of_group = 0;  // cost of all sequences, for one group of heads
  DecodeCost an_item = 0;   // cost of the last item that this thread saw
  bool differs = false;     // whether items differ in cost
  DecodeCut cut{};
  DecodeCost at[2] = {};  // where the block begins and ends
  int head_group[2] = {};
  // The first pass sums up the costs, the second looks for the two places. A small batch stays in
  // registers between them.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    uint64_t base = 0;
#pragma unroll 1
    for (int b0 = 0; b0 < params.batch; b0 += kScheduleThreads) {
      const int b = b0 + threadIdx.x;
      if (pass == 0 || !one_chunk) {
        own = {};
        if (b < params.batch) {
          s = decode_sequence(params.rule, b);
          own = {cost_of(params.rule, s), unsigned(items_of(params.rule, s))};
          if (own.items > 0) {
            differs |= an_item > 0 && an_item != item_cost(params.rule, s);
            an_item = item_cost(params.rule, s);
          }
        }
        uint64_t chunk = 0;
        if (b0 > 0) __syncthreads();
        before = CostAndItems::of(base + sum_before(own.packed(), places.warp_sums, &chunk));
        base += chunk;
      }
      if (pass == 0) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (before.cost > at[i] || at[i] >= before.cost + own.cost) continue;
        const DecodeCost cost = item_cost(params.rule, s), inside = at[i] - before.cost,
                         item = inside / cost;
        places.at[i] = {head_group[i], b,
                        int(item),     split_at(params.rule, s, cut, inside - item * cost),
                        before.cost,   int(before.items)};
      }
    }
    if (pass == 1) break;
    const CostAndItems all = CostAndItems::of(base);
    of_group = all.cost;
    differs |= an_item > 0 && an_item * all.items != of_group;
    differs = __syncthreads_or(differs);
    const DecodeCost total = of_group * params.rule.head_groups;
    if (of_group > 0)
      cut = cut_of(params.rule, total, all.items * params.rule.head_groups,
                   differs ? 0 : of_group / all.items, params.blocks);
    if (threadIdx.x == 0) {
      places.cut = cut;
      places.items = int(all.items);
      places.at[0] = places.at[1] = {params.rule.head_groups, 0, 0, 0, 0, 0};
    }
    if (of_group == 0) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const DecodeCost place = cut.begin_of(blockIdx.x + i);
      head_group[i] = int(place / of_group);
      at[i] = place - head_group[i] * of_group;
    }
    __syncthreads();
  }
  __syncthreads();
}

// Walks through the runs of a block. One thread does it.
class RunWalk {
 public:
  __device__ __forceinline__ RunWalk(const DecodeScheduleParams& params, const BlockPlaces& places)
      : params_(params),
        of_group_(places.cut.total / params.rule.head_groups),
        end_(places.at[1]),
        at_(places.at[0]),
        split_(places.at[0].split) {}

  // Fills in the next run; false if there is none.
  __device__ __forceinline__ bool next(ItemRun& run) {
#pragma unroll 1
    while (at_.head_group < params_.rule.head_groups && !is_behind_end()) {
      if (is_new_) sequence_ = decode_sequence(params_.rule, at_.batch);
      is_new_ = false;
      if (at_.item >= items_of(params_.rule, sequence_)) {
        begin_next_sequence();
        continue;
      }
      const bool last =
          at_.head_group == end_.head_group && at_.batch == end_.batch && at_.item == end_.item;
      const int from = split_ == kFirstSplit ? sequence_.split_begin : split_,
                to = last ? end_.split : sequence_.split_end;
      const int item = at_.item++;
      split_ = kFirstSplit;
      if (from >= to) continue;
      describe(item, from, to, run);
      return true;
    }
    return false;
  }
  // The run's item, counted over all sequences of its group of heads.
  __device__ __forceinline__ int item() const { return at_.items_before + at_.item - 1; }
  __device__ __forceinline__ int head_group() const { return at_.head_group; }

 private:
  static constexpr int kFirstSplit = -1;

  __device__ __forceinline__ bool is_behind_end() const {
    if (at_.head_group != end_.head_group) return at_.head_group > end_.head_group;
    return at_.batch != end_.batch ? at_.batch > end_.batch : at_.item > end_.item;
  }

  __device__ __forceinline__ void begin_next_sequence() {
    at_.before += cost_of(params_.rule, sequence_);
    at_.items_before += items_of(params_.rule, sequence_);
    at_.item = 0;
    is_new_ = true;
    split_ = kFirstSplit;
    if (++at_.batch < params_.batch) return;
    at_.batch = 0;
    ++at_.head_group;
    at_.before = 0;
    at_.items_before = 0;
  }

  __device__ __forceinline__ void describe(int item, int from, int to, ItemRun& of_item) const {
    DecodeRun& run = of_item.run;
    const DecodeRule& rule = params_.rule;
    const DecodeSequence& s = sequence_;
    run.exists = 1;
    run.batch = at_.batch;
    run.head_group = at_.head_group;
    run.kv_head = run.head_group / params_.groups_per_kv;
    run.query = item * rule.tile_queries;
    run.q_row = s.q_first + run.query;
    const TileMask::Range queries = {run.query, min(run.query + rule.tile_queries, s.q_length)};
    run.rows = queries.size() * params_.heads;
    run.k_first = s.k_first;
    run.k_length = s.k_length;
    run.mask = mask_of(rule, s);
    run.keys = seen_keys(rule, s, queries);
    // An item that sees no key leaves no partials, though blocks may share it.
    run.splits = run.keys.empty() ? TileMask::Range{s.split_begin, s.split_begin}
                                  : splits_of(rule, s, run.keys);
    run.split_tiles = s.split_tiles;
    run.first_split = from;
    run.tiles = {max(from * s.split_tiles, run.keys.begin / rule.tile_n),
                 min(to * s.split_tiles, ceil_div(run.keys.end, rule.tile_n))};
    run.unmasked = unmasked_tiles(rule, s, queries);
    run.has_first = from == s.split_begin;
    run.is_whole = run.has_first && to == s.split_end;
    run.merges = !run.has_first && to == s.split_end;
    run.folds = run.fold_partials = run.ends_item = 0;
    of_item.cost = item_cost(rule, s);
    of_item.at = at_.head_group * of_group_ + at_.before + DecodeCost(item) * of_item.cost;
    of_item.split_begin = s.split_begin;
    of_item.split_end = s.split_end;
  }

  const DecodeScheduleParams& params_;
  const DecodeCost of_group_;  // cost of a group of heads
  const DecodePlace end_;
  DecodePlace at_;
  int split_;
  bool is_new_ = true;
  DecodeSequence sequence_{};
};

// Returns the blocks that share the item. starts: the split that each begins with, and the end of
// the last one. One warp calls it.
__device__ __forceinline__ TileMask::Range find_sharers(const DecodeScheduleParams& params,
                                                        const DecodeCut& cut, const ItemRun& item,
                                                        short* starts) {
  const int first = cut.block_at(item.at),
            last = min(params.blocks, cut.block_at(item.at + item.cost) + 1);
  DecodeSequence s{};
  s.split_tiles = item.run.split_tiles;
  s.split_begin = item.split_begin;
  s.split_end = item.split_end;
  const auto start = [&](int block) {
    const DecodeCost at = cut.begin_of(block);
    if (at <= item.at) return s.split_begin;
    return at - item.at >= item.cost ? s.split_end : split_at(params.rule, s, cut, at - item.at);
  };
#pragma unroll 1
  for (int i = threadIdx.x % 32; first + i <= last; i += 32) starts[i] = short(start(first + i));
  __syncwarp();
  return {first, last};
}

// The splits in the item of a block that has those from `from` to `to` of the sequence.
__device__ __forceinline__ BlockSplits block_splits(const ItemRun& item, int from, int to) {
  return BlockSplits::of(item.run.splits, from == item.split_begin, from, to);
}

// Lists slots of the blocks that share an item, in order, and returns how many. slots_of() names
// those of one block's splits. One warp calls it; each lane has one block at a time.
template <class SlotsOf>
__device__ __forceinline__ int list_slots(const DecodeScheduleParams& params, const ItemRun& item,
                                          const TileMask::Range& blocks, const short* starts,
                                          int* list, const SlotsOf& slots_of) {
  const int lane = threadIdx.x % 32;
  int count = 0;
#pragma unroll 1
  for (int i0 = 0; blocks.begin + i0 < blocks.end; i0 += 32) {
    const int i = i0 + lane, block = blocks.begin + i;
    BlockSlots own;
    if (block < blocks.end && starts[i] < starts[i + 1])
      own = slots_of(block_splits(item, starts[i], starts[i + 1]));
    int at = own.size();
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, at, step);
      if (lane >= step) at += other;
    }
    const int all = __shfl_sync(~0u, at, 31);
    at += count - own.size();
    const int slot = block * params.slots;
    if (own.lone >= 0) list[at++] = slot + own.lone;
#pragma unroll 1
    for (int n = 0; n < own.count; ++n) list[at++] = slot + own.first + n;
    count += all;
  }
  return count;
}

// Lists what is to be merged of an item that the block does not begin: the fold that it ends, if
// another block begins it, and the item, if the block has its last split. One warp calls it.
__device__ __forceinline__ void list_partials(const DecodeScheduleParams& params,
                                              const DecodeCut& cut, ItemRun& item, short* starts) {
  DecodeRun& run = item.run;
  MergeLists& lists = params.schedule.lists[blockIdx.x];
  const TileMask::Range blocks = find_sharers(params, cut, item, starts);
  const int index = int(blockIdx.x) - blocks.begin, splits = run.splits.size(),
            folds = ceil_div(splits, kSplitsPerFold), slots = params.slots;
  const BlockSplits own = block_splits(item, starts[index], starts[index + 1]);
  const bool shares_fold = own.ends_shared_fold(splits), merges = run.merges != 0;
  const int fold = own.begin / kSplitsPerFold;
  const bool ends_item = merges && shares_fold && fold + 1 == folds;
  int fold_partials = 0, partials = 0;
  if (shares_fold)
    fold_partials =
        list_slots(params, item, blocks, starts, lists.fold,
                   [&](const BlockSplits& of) { return of.slots_of_fold(fold, slots); });
  if (merges)
    partials = list_slots(params, item, blocks, starts, lists.folds, [&](const BlockSplits& of) {
      return of.slots_of_folds(ends_item ? folds - 1 : folds, splits, slots);
    });
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    lists.rows = shares_fold || merges ? run.rows : 0;
    run.fold_partials = short(fold_partials);
    run.ends_item = ends_item;
    run.folds = short(partials);
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kScheduleThreads, 1)
    decode_schedule_kernel(const __grid_constant__ DecodeScheduleParams params) {
  __shared__ BlockPlaces places;
  __shared__ ItemRun item;
  __shared__ short starts[kMaxDecodeBlocks + 1];
  launch_dependents();
  wait_for_previous_kernel();
  find_work(params, places);
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  if (params.lists_partials && lane == 0) params.schedule.lists[blockIdx.x].rows = 0;
  RunWalk walk(params, places);
  int next = 0;
  for (int count = 0;; ++count) {
    const bool exists = __any_sync(~0u, lane == 0 && walk.next(item));
    if (lane == 0) item.run.exists = exists;
    __syncwarp();
    if (exists && !item.run.has_first) {
      if (params.lists_partials) {
        list_partials(params, places.cut, item, starts);
      } else if (lane == 0) {
        item.run.ends_item = item.run.merges;
        item.run.merges = 0;
      }
    }
    // Runs after a block's first one are written at places that no two have in common: blocks have
    // consecutive items, and share at most the last one with the next block.
    const int own = __shfl_sync(~0u, walk.head_group() * places.items + walk.item(), 0);
    const int place = params.blocks + own + int(blockIdx.x);
    if (lane == 0) item.run.next = place + 1;
    __syncwarp();
    reinterpret_cast<int*>(params.schedule.runs + (count == 0 ? int(blockIdx.x) : next))[lane] =
        reinterpret_cast<const int*>(&item.run)[lane];
    next = place + 1;
    if (!exists) break;
    __syncwarp();
  }
}

}  // namespace flash3::cuda::sm90
