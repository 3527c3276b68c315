// SPDX-License-Identifier: Apache-2.0
// Split kernels: blocks share a work tile, each with a split of its keys (device/key_splits.hpp).
//
// A consumer warpgroup leaves O, not normalised, with the maxima and sums of its rows in the
// split's slot and counts itself in. The last one of a work tile's to come, whichever block it is
// in, merges what all have left, in the order of the splits, and stores the result as any other
// kernel does. So nobody waits for a split.
//
// Slots are a ring, so that their memory follows from the grid and not from the batch: split number
// i of the launch has slot i modulo their number. The scheduler hands it out when what lay there
// before has been merged. It waits for splits with lower numbers only, and those were handed out
// before: so every block ends. Where no tile of the launch has several splits (SplitSlots::most is
// 1) there are neither slots nor counters.
#pragma once

#include "cuda/device/key_splits.hpp"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/sm90/forward/consume.cuh"
#include "cuda/sm90/forward/kernel_params.h"
#include "cuda/sm90/forward/output_sums.cuh"

namespace flash3::cuda::sm90 {

// Shared memory of a split kernel.
template <class Common, ForwardConfig kRow>
  requires(kRow.split)
struct SharedOf<Common, kRow> : Common {
  KeySplit splits[kTileSlots];                // of the tiles in the ring
  KeySplit warp_splits[4 * kRow.warpgroups];  // each consumer warp's
};

// Waits until what lay before in the slot of split number i has been merged.
template <class Traits>
__device__ __forceinline__ void wait_for_slot(const SplitSlots& slots, int i) {
  const int* const freed = &slots.freed[i & slots.mask];
  const int least = (i >> slots.bits) * Traits::kWarpgroups;
  if (least > 0) wait_until([&] { return load_acquire(freed) >= least; }, "split_slot_free", least);
}

// Writes split number i of the launch, of the sequence at this place of the list, when its slot is
// free. By one thread.
template <class Traits>
__device__ __forceinline__ void write_split(const ForwardParams& params, int i, int place,
                                            WorkTile& work, KeySplit& split) {
  const TileSchedule& schedule = params.schedule;
  const SplitSlots& slots = kernel_params(params).splits;
  const SequenceList& list = schedule.sequences;
  if (place >= list.count) {
    work.valid = false;
    split = {0, 1, 0, 0};
    return;
  }
  work.sequence = list.rows[place];
  const int most = key_splits(work.sequence.k_length, slots.most), at = i - list.first_tile[place];
  const int tile = int(unsigned(at) / unsigned(most)), index = at - tile * most;
  split = {index, most, i & slots.mask, (i - index) & slots.mask};
  forget_memory();
  work = work_tile_at(schedule, work.sequence, Traits::kTileN, Traits::kBand, tile);
  forget_memory();
  if (slots.most > 1) {
    // Of the split itself, and of the first one, whose slot has the counter of all.
    wait_for_slot<Traits>(slots, i);
    if (split.index > 0) wait_for_slot<Traits>(slots, i - split.index);
  }
  take_key_split(work, Traits::kTileN, split);
  if (!split.exists()) add_release(&slots.freed[split.slot], Traits::kWarpgroups);
}

// schedule_tiles() for splits.
template <class Traits, bool kAllWait>
__device__ __forceinline__ void schedule_splits(const ForwardParams& params,
                                                typename Traits::Shared& shared) {
  const TileSchedule& schedule = params.schedule;
  TileRing& ring = shared.tiles;
  const bool leader = threadIdx.x % 32 == 0;
  const TileCounter counter(schedule);
  if (leader) counter.begin();
  wait_for_previous_kernel();
  SequenceWalk walk(schedule.sequences);
  PipelineState<kTileSlots> slot;
  for (int i = blockIdx.x;;) {
    wait(&ring.barriers.empty[slot.stage], slot.phase ^ 1, "tile_empty");
    const int place = walk.find(i);
    if (leader)
      write_split<Traits>(params, i, place, ring.tiles[slot.stage], shared.splits[slot.stage]);
    __syncwarp();
    if (shared.splits[slot.stage].exists()) {
      const bool valid = ring.tiles[slot.stage].valid;
      arrive(&ring.barriers.full[slot.stage]);
      slot.advance();
      if (!valid) break;
      if (schedule.counter != nullptr) {
        // As in schedule_tiles().
        if (kAllWait || leader) wait(&ring.wanted, (slot.stage + 1) % 2, "tile_wanted");
        __syncwarp();
      }
    }
    i = __shfl_sync(~0u, leader ? counter.next(i) : 0, 0);
  }
  if (leader) counter.finish();
}

// The scheduler of kernels on a cache, which is a ragged batch whose sequences share no tiles.
template <class Traits, bool kAllWait = false>
__device__ __forceinline__ void schedule_cache(const ForwardParams& params,
                                               typename Traits::Shared& shared) {
  if constexpr (Traits::kSplit) {
    schedule_splits<Traits, kAllWait>(params, shared);
  } else {
    schedule_tiles<Traits::kTileN, Traits::kBand, true, kAllWait>(params.schedule, shared.tiles);
  }
}

// A consumer warpgroup's rows of a split.
template <class Traits>
struct SplitRows {
  using Output = float[Traits::kHeadDimV / 2];

  const SplitSlots& slots;
  const KeySplit& split;
  int warpgroup, thread;

  // Whether the rows are whole now: merged if there are several splits. unit: what the rows of O
  // are to be multiplied by; it may differ from split to split, and is 1 where they have been
  // merged.
  template <class Softmax>
  __device__ __forceinline__ bool merge(Softmax& softmax, Output& r_o, float (&unit)[2]) const {
    if (split.count > 1) {
      Softmax::scale_rows(r_o, unit);
      store(softmax, r_o);
      if (!is_last()) return false;
      load_all(softmax, r_o);
      unit[0] = unit[1] = 1.f;
      sync(ForwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);  // all have read
      if (thread == 0) arrived() = 0;
    }
    free();
    return true;
  }

  // The slots of all splits may be written again. That of a whole tile holds nothing to wait for.
  __device__ __forceinline__ void free() const {
    if (slots.most == 1) return;
    if (split.count == 1) {
      if (thread == 0) atomicAdd(&slots.freed[split.slot], 1);
    } else if (thread < split.count) {
      add_release(&slots.freed[slot_of(thread)], 1);
    }
  }

 private:
  static constexpr int kQuads = Traits::kHeadDimV / 8;  // two columns of the thread's two rows each
  static constexpr int kAtOnce = 8;
  static constexpr int kThreads = kWarpgroupThreads;

  __device__ __forceinline__ int slot_of(int index) const {
    return (split.first_slot + index) & slots.mask;
  }
  __device__ __forceinline__ int64_t rows_of(int slot) const {
    return int64_t(slot) * Traits::kWarpgroups + warpgroup;
  }
  // This thread's; the next quad is kThreads further.
  __device__ __forceinline__ float4* first_quad(int slot) const {
    return static_cast<float4*>(slots.out) + rows_of(slot) * kQuads * kThreads + thread;
  }
  // The maxima and sums of the thread's two rows.
  __device__ __forceinline__ float4* max_and_sum(int slot) const {
    return static_cast<float4*>(slots.max_and_sum) + rows_of(slot) * kThreads + thread;
  }
  __device__ __forceinline__ int& arrived() const {
    return slots.arrived[rows_of(split.first_slot)];
  }

  template <class Softmax>
  __device__ __forceinline__ void store(const Softmax& softmax, const Output& r_o) const {
    float4* const quads = first_quad(split.slot);
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
      quads[i * kThreads] = {r_o[4 * i], r_o[4 * i + 1], r_o[4 * i + 2], r_o[4 * i + 3]};
    float4 x = {softmax.row_max[0], softmax.row_max[1], quad_sum(softmax.row_sum[0]),
                quad_sum(softmax.row_sum[1])};
    const float largest[2] = {quad_max(softmax.row_largest[0]), quad_max(softmax.row_largest[1])};
    if (Softmax::kKeepsLargest && has_largest()) x.z = largest[0], x.w = largest[1];
    *max_and_sum(split.slot) = x;
  }

  // A quad has its sums once: in the place of them its second thread has the largest scores.
  __device__ __forceinline__ bool has_largest() const { return thread % 4 == 1; }

  // Counts the warpgroup in; whether all splits are there.
  __device__ __forceinline__ bool is_last() const {
    sync(ForwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);  // all have stored
    const bool last = thread == 0 && add_acquire_release(&arrived(), 1) == split.count - 1;
    __syncwarp();
    return named_barrier_any(int(ForwardBarrier::kOutputStaged) + warpgroup, kWarpgroupThreads,
                             last);
  }

  // What a row with maximum m weighs beside the largest of all splits.
  template <class Score>
  static __device__ __forceinline__ float weight_of(const Score& score, float m, float largest) {
    return m == -kInfinity ? 0.f : rescaling(score, m, largest, score.shift_of(largest));
  }

  template <class Softmax>
  __device__ __forceinline__ void load_all(Softmax& softmax, Output& r_o) const {
    float max[2] = {-kInfinity, -kInfinity};
#pragma unroll 1
    for (int p = 0; p < split.count; ++p) {
      const float4 x = __ldcg(max_and_sum(slot_of(p)));
      max[0] = fmaxf(max[0], x.x), max[1] = fmaxf(max[1], x.y);
    }
    // The second thread of a quad has largest scores there.
    const bool largest = has_largest();
    float sum[2] = {largest ? -kInfinity : 0.f, largest ? -kInfinity : 0.f};
#pragma unroll
    for (float& x : r_o) x = 0.f;
#pragma unroll 1
    for (int p = 0; p < split.count; ++p) {
      const int slot = slot_of(p);
      const float4 x = __ldcg(max_and_sum(slot));
      const float factor[2] = {weight_of(softmax.score, x.x, max[0]),
                               weight_of(softmax.score, x.y, max[1])};
      sum[0] = largest ? fmaxf(sum[0], x.z) : fmaf(x.z, factor[0], sum[0]);
      sum[1] = largest ? fmaxf(sum[1], x.w) : fmaf(x.w, factor[1], sum[1]);
      // From global memory by way of the L2 cache, where the other blocks' splits are.
      const float4* const quads = first_quad(slot);
#pragma unroll
      for (int i = 0; i < kQuads; i += kAtOnce)
        add_quads<kAtOnce>(r_o, i, factor[0], factor[1],
                           [&](int quad) { return __ldcg(quads + quad * kThreads); });
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.row_max[h] = max[h];
      softmax.row_sum[h] = thread % 4 == 0 ? sum[h] : 0.f;  // of the quad
      softmax.row_largest[h] = largest ? sum[h] : -kInfinity;
    }
  }
};

template <class Traits>
struct FinishedRows<Traits, true> {
  template <class Consumer>
  static __device__ __forceinline__ SplitRows<Traits> split(const Consumer& c) {
    return {kernel_params(c.params).splits, c.shared.warp_splits[c.warp], c.warpgroup, c.thread};
  }
  // Notes the split of the work tile.
  template <class Consumer, class Tiles>
  static __device__ __forceinline__ void note(const Consumer& c, const Tiles& source) {
    if (c.thread % 32 == 0) c.shared.warp_splits[c.warp] = c.shared.splits[source.stage()];
  }
  template <class Consumer>
  static __device__ __forceinline__ void pass(const Consumer& c) {
    split(c).free();
  }

  float unit[2] = {1.f, 1.f};  // of O

  template <class Consumer, class Tile>
  __device__ __forceinline__ void begin(const Consumer&, Tile& tile,
                                        const typename Traits::KvState& last_v, float (&)[2],
                                        float (&)[2]) {
    tile.operands.scale_normalisation(unit, last_v);
    if constexpr (Consumer::kBiased) tile.bias.scale_normalisation(unit);
  }
  template <class Consumer, class Tile, class Store>
  __device__ __forceinline__ void finish(const Consumer& c, Tile& tile, float (&inverse_sum)[2],
                                         float (&lse)[2], const Store& store) {
    const bool is_whole = split(c).merge(tile.softmax, tile.output, unit);
    tile.softmax.finish(inverse_sum, lse);
    if (is_whole) add_sinks(c.params, c.output(), c.row, inverse_sum, lse);
    inverse_sum[0] *= unit[0], inverse_sum[1] *= unit[1];
    if (is_whole) {
      tile.softmax.scale_rows(tile.output, inverse_sum);
      store_rows(c.params, c.output(), c.row, tile.softmax, lse);
      store();
    }
  }
};

}  // namespace flash3::cuda::sm90
