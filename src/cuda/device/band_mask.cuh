// SPDX-License-Identifier: Apache-2.0
// Masks a tile of scores that the mask's edge, or the end of the keys, runs through. Tiles inside
// the band skip this.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/sequence.hpp"

namespace flash3::cuda {

// The keys that a row sees: [first, end), also outside the tensor.
struct RowKeys {
  int first, end;
};

// What a query of a sequence with seq_k keys sees; mask: the sequence's.
template <bool kBand>
__device__ __forceinline__ RowKeys keys_of_row(const TileMask& mask, int seq_k, int row) {
  if constexpr (!kBand) return {0, seq_k};
  return {mask.first(row), min(seq_k, mask.end(row))};
}

// upper, lower: what this thread's two rows see; key: the column of its element 0. kFirst: whether
// there may be keys in front of what a row sees.
template <bool kBand, bool kFirst = kBand, int N>
__device__ __forceinline__ void mask_scores(float (&r_s)[N], const RowKeys& upper,
                                            const RowKeys& lower, int key) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // First and last visible key of the row, relative to element 0.
    const RowKeys keys = kBand && h == 1 ? lower : upper;  // without a band all rows see the same
    const int first = keys.first - key, last = keys.end - 1 - key;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int col = 8 * j + e;
        const bool visible = (!kFirst || col >= first) && col <= last;
        if (!visible) r_s[4 * j + 2 * h + e] = -kInfinity;
      }
    }
  }
}

// A bit for each column before `end` that a thread has of a row of scores: column 8 · j + e is bit
// 2 · j + e.
template <int kColumns>
__device__ __forceinline__ uint32_t columns_before(int end) {
  const int inside = min(max(end, 0), 4 * kColumns);
  return (1u << (inside / 8 * 2 + min(inside % 8, 2))) - 1;
}

// As mask_scores<true>, by bits: one instruction makes seven predicates of them, where two
// comparisons a score take longer. Measured in the backward, which uses it.
template <int N>
__device__ __forceinline__ void mask_scores_by_bits(float (&r_s)[N], const RowKeys& upper,
                                                    const RowKeys& lower, int key) {
  constexpr int kSlices = (N + 61) / 62, kSlice = N / kSlices;  // bits of half a slice: 31 at most
  static_assert(kSlice * kSlices == N && kSlice % 4 == 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowKeys& seen = h == 0 ? upper : lower;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int first = key + slice * kSlice * 2;
      const uint32_t visible = columns_before<kSlice / 2>(seen.end - first) &
                               ~columns_before<kSlice / 2>(seen.first - first);
#pragma unroll
      for (int i = 0; i < kSlice / 2; ++i) {
        float& x = r_s[slice * kSlice + i / 2 * 4 + 2 * h + i % 2];
        x = visible & 1u << i ? x : -kInfinity;
      }
    }
  }
}

}  // namespace flash3::cuda
