// Masks a tile of scores that the mask's edge, or the end of the keys, runs through. Tiles inside
// the band skip this.
#pragma once

#include "hopper/device/online_softmax.cuh"
#include "hopper/device/tile_schedule.hpp"

namespace flash3::hopper {

// The keys that a row sees: [first, end), also outside the tensor.
struct RowKeys {
  int first, end;
};

// Those of a query of a sequence with seq_k keys; mask: its own.
template <bool kBand>
__device__ __forceinline__ RowKeys keys_of_row(const TileMask& mask, int seq_k, int row) {
  if constexpr (!kBand) return {0, seq_k};
  return {mask.first(row), min(seq_k, mask.end(row))};
}

// upper, lower: what this thread's two rows see; key: the column of its element 0.
template <bool kBand, int N>
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
        const bool visible = kBand ? col >= first && col <= last : col <= last;
        if (!visible) r_s[4 * j + 2 * h + e] = -kInfinity;
      }
    }
  }
}

}  // namespace flash3::hopper
