// SPDX-License-Identifier: Apache-2.0
// Remaps the scores of a tile that lie beyond the reach of the softcap's polynomial (softcap.hpp).
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/softcap.hpp"

namespace flash3::cuda {

// Whether one of the scores lies below −range, or is a NaN of that sign.
template <int N>
__device__ __forceinline__ bool any_below(const float (&r_s)[N], float range) {
  uint32_t lowest[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) lowest[c] = max_of_bits<uint32_t>(r_s, c);
  return max(max(lowest[0], lowest[1]), max(lowest[2], lowest[3])) >
         (uint32_t(__float_as_int(range)) | 0x80000000u);
}

// Remaps the scores outside the range of the cap's polynomial to where it gives their tanh;
// negative ones of row h, which has the elements j with j / 2 % 2 = h, only where low[h].
template <int N>
__device__ __forceinline__ void remap_scores(const Softcap& cap, float (&r_s)[N],
                                             const bool (&low)[2]) {
  const float stay_below[2] = {low[0] ? -kInfinity : 0.f, low[1] ? -kInfinity : 0.f};
  // In groups: those without such a score are spared the work, and only one needs registers for it.
  constexpr int kGroup = 8;
#pragma unroll
  for (int group = 0; group < N; group += kGroup) {
    float largest = 0.f;
#pragma unroll
    for (int j = group; j < group + kGroup; ++j) largest = fmaxf(largest, fabsf(r_s[j]));
    if (!(largest > cap.range)) continue;
#pragma unroll
    for (int j = group; j < group + kGroup; ++j) {
      // The others stay, so that no score's bits depend on its neighbours; and NaNs.
      const float size = fabsf(r_s[j]);
      const float remapped = cap.remapped(exp2_approx(size * cap.log2_u));
      if (size > cap.range && !(r_s[j] < stay_below[j / 2 % 2]))
        r_s[j] = copysignf(remapped, r_s[j]);
    }
  }
}

// The same for all rows, behind a test of the tile.
template <int N>
__device__ __forceinline__ void remap_tile(const Softcap& cap, float (&r_s)[N]) {
  int highest[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) highest[c] = max_of_bits<int>(r_s, c);
  const bool beyond =
      max(max(highest[0], highest[1]), max(highest[2], highest[3])) > __float_as_int(cap.range) ||
      any_below(r_s, cap.range);
  if (__any_sync(~0u, beyond)) remap_scores(cap, r_s, {true, true});
}

}  // namespace flash3::cuda
