// SPDX-License-Identifier: Apache-2.0
// The blocks of a launch after those that compute: they merge what these share. A warp has a row
// at a time, of a fold that a block ends and others begin, or of an item. So merging takes as many
// multiprocessors as there are rows, and those that have nothing to compute wait for the partials.
//
// A warp waits only for blocks that compute and for rows before its own, of which a block has
// consecutive ones: for blocks with lower numbers, which were launched before, or for warps beside
// it. So every block ends, however many run at a time.
#pragma once

#include "cuda/device/ptx/words.cuh"
#include "cuda/sm90/decode/partials.cuh"

namespace flash3::cuda::sm90 {

// Shared memory of a block that merges.
template <class Traits>
struct MergeMemory {
  int rows[kMaxDecodeBlocks];  // that each block leaves to be merged
  DecodeRun runs[Traits::kConfig.threads() / 32];
  MergeLists lists[Traits::kConfig.threads() / 32];
};

// A row that is to be merged: of the item of the block's first run.
struct SharedRow {
  int block, row;
};

// The rows that all blocks leave to be merged, one after the other. Whole warps call it.
class SharedRows {
 public:
  __device__ __forceinline__ explicit SharedRows(const int (&rows)[kMaxDecodeBlocks])
      : rows_(rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) own_ += rows[lane * kOfLane + i];
    int sum = own_;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    before_ = sum - own_;
    count_ = __shfl_sync(~0u, sum, 31);
  }

  __device__ __forceinline__ int count() const { return count_; }

  __device__ __forceinline__ SharedRow find(int index) const {
    const int lane = threadIdx.x % 32;
    SharedRow found{lane * kOfLane, index - before_};
    const bool has_it = found.row >= 0 && found.row < own_;
    if (has_it)
      for (; found.row >= rows_[found.block]; ++found.block) found.row -= rows_[found.block];
    const int source = __ffs(__ballot_sync(~0u, has_it)) - 1;
    return {__shfl_sync(~0u, found.block, source), __shfl_sync(~0u, found.row, source)};
  }

 private:
  static constexpr int kOfLane = kMaxDecodeBlocks / 32;  // blocks whose rows a lane counts
  const int (&rows_)[kMaxDecodeBlocks];
  int own_ = 0, before_, count_;
};

// Stores a row of a merged fold as a partial, for whoever merges the item. block: that ends the
// fold.
template <class Traits>
__device__ __forceinline__ void store_fold(const DecodeParams& params, int block,
                                           const MergedRow<Traits>& fold, int row, int lane) {
  const int slot = (block + 1) * params.slots - kMergedFoldSlot;
  Bits128* const of_row = partial_at<Traits>(params, slot) + row * Traits::kConfig.units_of_row();
#pragma unroll
  for (int b = 0; b < Traits::kDimBlocks; ++b)
    store_relaxed(of_row + 32 * b + lane,
                  partial_unit(fold.out[2 * b], fold.out[2 * b + 1], params.ticket));
  const bool has_largest = Traits::kMaxLogits && lane == kLargestWarp;
  if (lane < 4)
    store_relaxed(of_row + Traits::kHeadDimV / 2 + lane,
                  partial_unit(fold.sum, has_largest ? fold.largest : fold.max, params.ticket));
}

template <class Traits>
__device__ __forceinline__ void store_row(const DecodeParams& params, const DecodeRun& run,
                                          const MergedRow<Traits>& all, int row, int lane) {
  float sums[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) sums[w] = __shfl_sync(~0u, all.sum, w);
  const QueryRow at = query_row(params, run, row);
  const RowResult result = finish_row(params, all.max, sum_of_warps(sums), all.largest, at.head);
  const OutRow<Traits> out(params, run, at);
#pragma unroll
  for (int b = 0; b < Traits::kDimBlocks; ++b) {
    const int dim = 64 * b + lane / 8 * 16;
    out.store(dim + Traits::dim_of(lane % 8, 0), all.out[2 * b] * result.inverse_sum);
    out.store(dim + Traits::dim_of(lane % 8, 1), all.out[2 * b + 1] * result.inverse_sum);
  }
  if (lane == 0) store_values<Traits::kMaxLogits>(params, run, at, result.values);
}

// Merges a row of the fold that a block ends and others begin, if there is one, and of the item, if
// the block ends it. An item's last fold stays in registers.
template <class Traits>
__device__ __forceinline__ void merge_shared_row(const DecodeParams& params, const DecodeRun& run,
                                                 const MergeLists& lists, const SharedRow& at) {
  const int lane = threadIdx.x % 32, fold_partials = uniform(run.fold_partials),
            folds = uniform(run.folds);
  const bool merges = uniform(run.merges) != 0, ends_item = uniform(run.ends_item) != 0;
  MergedRow<Traits> fold;
  // The shared fold, then the item: one copy of the code.
#pragma unroll 1
  for (int step = 0; step < 2; ++step) {
    MergedRow<Traits> merged = merge_row<Traits>(params, step == 0 ? lists.fold : lists.folds,
                                                 step == 0 ? fold_partials : folds, at.row, lane);
    if (step == 0) {
      fold = merged;
      if (fold_partials > 0 && !ends_item) store_fold(params, at.block, fold, at.row, lane);
      if (!merges) break;
    } else {
      if (ends_item) merged.add(fold);
      store_row(params, run, merged, at.row, lane);
    }
  }
}

// Brings words of global memory into shared memory. A whole warp calls it.
template <class T>
__device__ __forceinline__ void bring(T& to, const T& from) {
  constexpr int kWords = int(sizeof(T) / sizeof(int));
  static_assert(kWords <= 32);
  const int lane = threadIdx.x % 32;
  if (lane < kWords)
    reinterpret_cast<int*>(&to)[lane] = __ldcg(reinterpret_cast<const int*>(&from) + lane);
}

template <class Traits>
__device__ __forceinline__ void merge_shares(const DecodeParams& params,
                                             MergeMemory<Traits>& shared) {
  static_assert(sizeof(shared) <= Traits::kConfig.shared_bytes());
  constexpr int kThreads = Traits::kConfig.threads(), kWarps = kThreads / 32;
  const int warp = uniform(threadIdx.x / 32);
  launch_dependents();
  wait_for_previous_kernel();
  const DecodeSchedule& schedule = params.schedule;
#pragma unroll
  for (int before = 0; before < kMaxDecodeBlocks; before += kThreads) {
    const int block = before + int(threadIdx.x);
    if (block < kMaxDecodeBlocks)
      shared.rows[block] = block < params.blocks ? __ldcg(&schedule.lists[block].rows) : 0;
  }
  __syncthreads();
  const SharedRows rows(shared.rows);
  const int of_block = ceil_div(rows.count(), int(gridDim.x) - params.blocks),
            first = (int(blockIdx.x) - params.blocks) * of_block,
            end = min(first + of_block, rows.count());
#pragma unroll 1
  for (int index = first + warp; index < end; index += kWarps) {
    const SharedRow at = rows.find(index);
    bring(shared.runs[warp], schedule.runs[at.block]);
    bring(shared.lists[warp], schedule.lists[at.block]);
    __syncwarp();
    merge_shared_row<Traits>(params, shared.runs[warp], shared.lists[warp], at);
    __syncwarp();
  }
}

}  // namespace flash3::cuda::sm90
