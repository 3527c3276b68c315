// SPDX-License-Identifier: Apache-2.0
// The partials of items that several blocks share: how a block leaves them in the workspace, and
// how a row of some partials is merged (block_splits.hpp says which, merge_splits.cuh who does it).
//
// A partial is units of 16 bytes: two floats and the launch's ticket, a number that no other launch
// has and that memory does not hold by chance. A unit is stored and loaded as one, so who finds the
// ticket has the floats too, without a fence or a counter. The reader then overwrites the ticket,
// because a replay of a captured launch has the same one.
#pragma once

#include "cuda/device/ptx/words.cuh"
#include "cuda/sm90/decode/block_splits.hpp"
#include "cuda/sm90/decode/fold.cuh"

namespace flash3::cuda::sm90 {

// A query row has units of O, then one for each warp w with its sum and the row's max, or in the
// place of that kLargestWarp's the largest score, where the call wants it. Unit 32·b + 8·w + l of O
// holds the head dims 64·b + 16·w + dim_of(l, 0) and … + dim_of(l, 1).
inline constexpr int kLargestWarp = 1;
template <class Traits>
__device__ __forceinline__ Bits128* partial_at(const DecodeParams& params, int slot) {
  return static_cast<Bits128*>(params.partials) + int64_t(slot) * Traits::kConfig.partial_units();
}

__device__ __forceinline__ Bits128 partial_unit(float x, float y, unsigned long long ticket) {
  return {uint64_t(__float_as_uint(y)) << 32 | __float_as_uint(x), ticket};
}
__device__ __forceinline__ float2 floats_of(const Bits128& unit) {
  return {__uint_as_float(uint32_t(unit.low)), __uint_as_float(uint32_t(unit.low >> 32))};
}

// Stores a consumer warpgroup's rows of a partial, from first_row on, as far as there are `rows`.
// beside_sum: the max, or the largest score. A max is no larger than that, so a partial without it
// is as good as one of which the largest score is lower.
template <class Traits>
__device__ __forceinline__ void store_partial(const RowSums<Traits>& sums,
                                              const float (&beside_sum)[Traits::kColumns],
                                              Bits128* partial, unsigned long long ticket,
                                              int first_row, int rows, int thread) {
  constexpr int kOfRow = Traits::kConfig.units_of_row();
  const int lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int c = 0; c < Traits::kColumns; ++c) {
    const int row = first_row + c / 2 * 8 + lane % 4 * 2 + c % 2;
    if (row >= rows) continue;
    Bits128* const of_row = partial + row * kOfRow;
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b) {
      const float(&out)[RowSums<Traits>::kElements] = sums.out[b];
      store_relaxed(of_row + 32 * b + 8 * warp + lane / 4,
                    partial_unit(out[c / 2 * 4 + c % 2], out[c / 2 * 4 + 2 + c % 2], ticket));
    }
    if (lane < 4)
      store_relaxed(of_row + Traits::kHeadDimV / 2 + warp,
                    partial_unit(sums.sum[c], beside_sum[c], ticket));
  }
}

// Some partials of a row in a warp's registers. Each lane has every 32nd unit of O of all partials,
// and from partial lane / 4 the sum of warp lane % 4.
template <class Traits, int kAtOnce>
struct RowPartials {
  Bits128 out[kAtOnce][Traits::kDimBlocks], sum;

  // Waits for the first partials of a list, at most `count`, and overwrites their tickets.
  __device__ __forceinline__ void take(const DecodeParams& params, const int* list, int count,
                                       int row, int lane) {
    Bits128* const of_sum = row_at(params, list[min(lane / 4 % kAtOnce, count - 1)], row) +
                            Traits::kHeadDimV / 2 + lane % 4;
    // Where the list has no further partial a lane loads a unit again that it has loaded: ptxas
    // would issue loads with predicates one after the other.
    Bits128* at[kAtOnce];  // units 32 apart
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) at[n] = row_at(params, list[min(n, count - 1)], row) + lane;
    // Beside a block that computes it looks for the sums alone at first: all units, again and
    // again, would slow that block down, for whose partials others wait.
    if constexpr (Traits::kConfig.blocks > 1)
      wait_until(
          [&] {
            sum = load_relaxed(of_sum);
            return __all_sync(~0u, sum.high == params.ticket);
          },
          "sum_stored", list[0]);
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
        "partial_stored", list[0]);
    of_sum->high = 0;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int b = 0; b < Traits::kDimBlocks; ++b) at[n][32 * b].high = 0;
  }

  // The row's sum of warp lane % 4 in partial n, its max, and its largest score or no larger one.
  struct Numbers {
    float sum, max, largest;
  };
  __device__ __forceinline__ Numbers numbers(int n, int lane) const {
    const float2 x = floats_of(sum);
    return {__shfl_sync(~0u, x.x, 4 * n + lane % 4), __shfl_sync(~0u, x.y, 4 * n),
            Traits::kMaxLogits ? __shfl_sync(~0u, x.y, 4 * n + kLargestWarp) : -kInfinity};
  }

 private:
  static __device__ __forceinline__ Bits128* row_at(const DecodeParams& params, int entry,
                                                    int row) {
    return partial_at<Traits>(params, entry) + row * Traits::kConfig.units_of_row();
  }
};

// A row of merged partials: a lane's share of it, two head dims of each block.
template <class Traits>
struct MergedRow : Partial<2 * Traits::kDimBlocks> {
  bool is_empty = true;
  float largest = -kInfinity;  // score

  __device__ __forceinline__ void add(const MergedRow& x) {
    const float larger = fmaxf(largest, x.largest);
    if (is_empty)
      *this = x;
    else
      this->merge(x, Exp2{});
    largest = larger;
  }
};

// Merges a row of the first partials on a list, at most kAtOnce, into `all`.
template <int kAtOnce, class Traits>
__device__ __forceinline__ void merge_partials(const DecodeParams& params, const int* list,
                                               int count, int row, int lane,
                                               MergedRow<Traits>& all) {
  RowPartials<Traits, kAtOnce> partials;
  partials.take(params, list, count, row, lane);
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    if (n >= count) break;
    MergedRow<Traits> x;
    const auto numbers = partials.numbers(n, lane);
    x.sum = numbers.sum, x.max = numbers.max, x.largest = numbers.largest;
    x.is_empty = false;
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b) {
      const float2 pair = floats_of(partials.out[n][b]);
      x.out[2 * b] = pair.x, x.out[2 * b + 1] = pair.y;
    }
    all.add(x);
  }
}

// Merges a row of the partials on a list, from the first to the last. A multiprocessor reads
// partials slowly, so those that there are not are read again as seldom as possible.
template <class Traits>
__device__ __forceinline__ MergedRow<Traits> merge_row(const DecodeParams& params, const int* list,
                                                       int count, int row, int lane) {
  constexpr int kMany = Traits::kDimBlocks > 2 ? 4 : 8, kFew = 2;
  MergedRow<Traits> all;
#pragma unroll 1
  while (count > 0) {
    const bool many = count > kFew;
    if (many)
      merge_partials<kMany>(params, list, count, row, lane, all);
    else
      merge_partials<kFew>(params, list, count, row, lane, all);
    list += many ? kMany : kFew;
    count -= many ? kMany : kFew;
  }
  return all;
}

}  // namespace flash3::cuda::sm90
