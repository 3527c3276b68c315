// Masks a tile of scores that the band's edge, or the end of the keys, runs through. Tiles inside
// the band skip this.
#pragma once

#include "hopper/device/online_softmax.cuh"

namespace flash3::hopper {

// query: of each of this thread's two rows; key: the column of its element 0. lo, hi: the band's
// bounds, cut by the host to where no sum overflows.
template <bool kBand, int N>
__device__ __forceinline__ void mask_scores(float (&r_s)[N], int lo, int hi, const int (&query)[2],
                                            int key, int seq_k) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // First and last visible key of the row, relative to element 0.
    const int end = seq_k - 1 - key;
    const int first = query[h] + lo - key;
    const int last = kBand ? min(end, query[h] + hi - key) : end;
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
