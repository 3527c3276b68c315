// Masks a tile of scores that the band's edge, or the end of the keys, runs through. Tiles inside
// the band skip this.
#pragma once

#include "core/band.hpp"
#include "hopper/device/online_softmax.cuh"

namespace flash3::hopper {

// row: the first of this thread's two rows (the other is row + 8); key: the column of its element
// 0.
template <bool kBand, int N>
__device__ __forceinline__ void mask_scores(float (&r_s)[N], Band band, int row, int key,
                                            int seq_k) {
  constexpr Index kWidth = 2 * N;  // columns of the tile
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // First and last visible key of the row, relative to element 0, cut to where 32 bits suffice.
    Index last = Index(seq_k) - 1;
    Index first = 0;
    if constexpr (kBand) {
      last = min(last, row + 8 * h + band.hi);
      first = row + 8 * h + band.lo;
    }
    const int lo = int(max(min(first - key, kWidth), -kWidth));
    const int hi = int(max(min(last - key, kWidth), -kWidth));
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int col = 8 * j + e;
        const bool visible = kBand ? col >= lo && col <= hi : col <= hi;
        if (!visible) r_s[4 * j + 2 * h + e] = -kInfinity;
      }
    }
  }
}

}  // namespace flash3::hopper
