// SPDX-License-Identifier: Apache-2.0
// Items that several blocks share: how a block leaves its parts of an item in the workspace, and
// how a block merges the parts of a fold, or the folds of an item (shares.hpp says which block).
//
// A part is units of 16 bytes: two floats and the launch's ticket, a number that no other launch
// has and that memory does not hold by chance. A unit is stored and loaded as one, so who finds the
// ticket has the floats too, without a fence or a counter. The reader then overwrites the ticket,
// because a replay of a captured launch has the same one. A warp waits for parts only after its own
// work, and only for blocks with lower numbers, which were launched before: so every block ends,
// however many run at a time.
#pragma once

#include "hopper/decode/fold.cuh"
#include "hopper/decode/shares.hpp"
#include "hopper/device/ptx/memory.cuh"

namespace flash3::hopper {

// A query row has units of O, then one for each warp w with its sum and the row's max. Unit
// 32·b + 8·w + l of O holds the head dims 64·b + 16·w + dim_of(l, 0) and … + dim_of(l, 1).
template <class Traits>
__device__ __forceinline__ Bits128* part_at(const DecodeParams& params, int slot) {
  return static_cast<Bits128*>(params.parts) + int64_t(slot) * Traits::kConfig.part_units();
}

__device__ __forceinline__ Bits128 part_unit(float x, float y, unsigned long long ticket) {
  return {uint64_t(__float_as_uint(y)) << 32 | __float_as_uint(x), ticket};
}
__device__ __forceinline__ float2 floats_of(const Bits128& unit) {
  return {__uint_as_float(uint32_t(unit.low)), __uint_as_float(uint32_t(unit.low >> 32))};
}

// Stores a consumer warpgroup's rows of a part, from first_row on, as far as there are `rows`.
template <class Traits>
__device__ __forceinline__ void store_part(const RowSums<Traits>& sums, Bits128* part,
                                           unsigned long long ticket, int first_row, int rows,
                                           int thread) {
  constexpr int kOfRow = Traits::kConfig.units_of_row();
  const int lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int c = 0; c < Traits::kColumns; ++c) {
    const int row = first_row + c / 2 * 8 + lane % 4 * 2 + c % 2;
    if (row >= rows) continue;
    Bits128* const of_row = part + row * kOfRow;
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b) {
      const float(&out)[RowSums<Traits>::kElements] = sums.out[b];
      store_relaxed(of_row + 32 * b + 8 * warp + lane / 4,
                    part_unit(out[c / 2 * 4 + c % 2], out[c / 2 * 4 + 2 + c % 2], ticket));
    }
    if (lane < 4)
      store_relaxed(of_row + Traits::kHeadDimV / 2 + warp,
                    part_unit(sums.sum[c], sums.max[c], ticket));
  }
}

// Some parts of a row in a warp's registers. Each lane has every 32nd unit of O of all parts, and
// from part lane / 4 the sum of warp lane % 4.
template <class Traits>
struct RowParts {
  static constexpr int kAtOnce = Traits::kDimBlocks > 2 ? 4 : 8;
  Bits128 out[kAtOnce][Traits::kDimBlocks], sum;

  // Waits for the first parts of a list, at most `count`, and overwrites their tickets.
  __device__ __forceinline__ void take(const DecodeParams& params, const int* list, int count,
                                       int row, int lane) {
    Bits128* const of_sum = row_at(params, list[min(lane / 4 % kAtOnce, count - 1)], row) +
                            Traits::kHeadDimV / 2 + lane % 4;
    // Where the list has no further part a lane loads a unit again that it has loaded: ptxas would
    // issue loads with predicates one after the other.
    Bits128* at[kAtOnce];  // units 32 apart
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) at[n] = row_at(params, list[min(n, count - 1)], row) + lane;
    wait_until(
        [&] {
          sum = load_relaxed(of_sum);
          bool is_there = sum.high == params.ticket;
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
            for (int b = 0; b < Traits::kDimBlocks; ++b) out[n][b] = load_relaxed(at[n] + 32 * b);
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
            for (int b = 0; b < Traits::kDimBlocks; ++b)
              is_there &= out[n][b].high == params.ticket;
          return __all_sync(~0u, is_there);
        },
        "part_stored", list[0]);
    of_sum->high = 0;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int b = 0; b < Traits::kDimBlocks; ++b) at[n][32 * b].high = 0;
  }

  // The row's sum of warp lane % 4 in part n, and its max.
  __device__ __forceinline__ float2 sum_and_max(int n, int lane) const {
    const float2 x = floats_of(sum);
    return {__shfl_sync(~0u, x.x, 4 * n + lane % 4), __shfl_sync(~0u, x.y, 4 * n)};
  }

 private:
  static __device__ __forceinline__ Bits128* row_at(const DecodeParams& params, int entry,
                                                    int row) {
    return part_at<Traits>(params, entry) + row * Traits::kConfig.units_of_row();
  }
};

// A row of merged parts: a lane's share of it.
template <class Traits>
struct MergedRow {
  float2 out[Traits::kDimBlocks] = {};
  float sum = 0.f, max = -kInfinity;
  bool is_empty = true;

  __device__ __forceinline__ void add(const MergedRow& x) {
    if (is_empty) {
      *this = x;
      return;
    }
    const FoldFactors factors = fold_max(max, x.max);
    sum = fold_element(sum, x.sum, factors);
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b)
      out[b] = {fold_element(out[b].x, x.out[b].x, factors),
                fold_element(out[b].y, x.out[b].y, factors)};
  }
};

// Merges a row of the parts on a list, from the first to the last.
template <class Traits>
__device__ __forceinline__ MergedRow<Traits> merge_row(const DecodeParams& params, const int* list,
                                                       int count, int row, int lane) {
  constexpr int kAtOnce = RowParts<Traits>::kAtOnce;
  MergedRow<Traits> all;
#pragma unroll 1
  for (; count > 0; list += kAtOnce, count -= kAtOnce) {
    RowParts<Traits> parts;
    parts.take(params, list, count, row, lane);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (n >= count) break;
      MergedRow<Traits> x;
      const float2 sum_and_max = parts.sum_and_max(n, lane);
      x.sum = sum_and_max.x, x.max = sum_and_max.y;
      x.is_empty = false;
#pragma unroll
      for (int b = 0; b < Traits::kDimBlocks; ++b) x.out[b] = floats_of(parts.out[n][b]);
      all.add(x);
    }
  }
  return all;
}

// Stores a merged fold as a part, for the block that merges the item.
template <class Traits>
__device__ __forceinline__ void store_fold(const DecodeParams& params,
                                           const MergedRow<Traits>& fold, int row, int lane) {
  const int slot = int(blockIdx.x + 1) * params.slots - kMergedFoldSlot;
  Bits128* const of_row = part_at<Traits>(params, slot) + row * Traits::kConfig.units_of_row();
#pragma unroll
  for (int b = 0; b < Traits::kDimBlocks; ++b)
    store_relaxed(of_row + 32 * b + lane, part_unit(fold.out[b].x, fold.out[b].y, params.ticket));
  if (lane < 4)
    store_relaxed(of_row + Traits::kHeadDimV / 2 + lane,
                  part_unit(fold.sum, fold.max, params.ticket));
}

template <class Traits>
__device__ __forceinline__ void store_row(const DecodeParams& params, const DecodeRun& run,
                                          const MergedRow<Traits>& all, int row, int lane) {
  float sums[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) sums[w] = __shfl_sync(~0u, all.sum, w);
  const QueryRow at = query_row(params, run, row);
  const RowResult result = finish_row(params, all.max, sum_of_warps(sums), at.head);
  const OutRow<Traits> out(params, run, at);
#pragma unroll
  for (int b = 0; b < Traits::kDimBlocks; ++b) {
    const int dim = 64 * b + lane / 8 * 16;
    out.store(dim + Traits::dim_of(lane % 8, 0), all.out[b].x * result.inverse_sum);
    out.store(dim + Traits::dim_of(lane % 8, 1), all.out[b].y * result.inverse_sum);
  }
  if (lane == 0) store_row_lse(params, run, at, result.lse);
}

// Merges the fold that the block shares with others, if there is one, and the item, if the block
// has its last split. All warps of the block call it; each has a row at a time. An item's last fold
// stays in registers.
template <class Traits>
__device__ __forceinline__ void merge_parts(const DecodeParams& params, const DecodeRun& run,
                                            const MergeLists& lists) {
  constexpr int kWarps = Traits::kConfig.threads() / 32;
  const int lane = threadIdx.x % 32, rows = uniform(run.rows);
  const int fold_parts = uniform(run.fold_parts), folds = uniform(run.folds);
  const bool merges = uniform(run.merges) != 0, ends_item = uniform(run.ends_item) != 0;
#pragma unroll 1
  for (int row = uniform(threadIdx.x / 32); row < rows; row += kWarps) {
    MergedRow<Traits> fold;
    // The shared fold, then the item: one copy of the code.
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      MergedRow<Traits> merged = merge_row<Traits>(params, step == 0 ? lists.fold : lists.folds,
                                                   step == 0 ? fold_parts : folds, row, lane);
      if (step == 0) {
        fold = merged;
        if (fold_parts > 0 && !ends_item) store_fold(params, fold, row, lane);
        if (!merges) break;
      } else {
        if (ends_item) merged.add(fold);
        store_row(params, run, merged, row, lane);
      }
    }
  }
}

}  // namespace flash3::hopper
