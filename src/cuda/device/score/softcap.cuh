// SPDX-License-Identifier: Apache-2.0
// Soft-capped scores (softcap.hpp): the one definition of their value and derivative, for all
// kernels, and what brings scores beyond the reach of its polynomial into it.
#pragma once

#include "cuda/device/score/softcap.hpp"
#include "cuda/device/score/softmax.cuh"

namespace flash3::cuda {

// Takes remapped scores, and maxima of them: P rises, so they have the order of capped ones.
template <>
struct ModOf<ScoreKind::kSoftcap> {
  static constexpr bool kRemaps = true, kSlope = true;

  Softcap cap;

  template <class Params>
  static __device__ __forceinline__ ModOf of(const Params& params) {
    return {params.softcap};
  }
  template <class... Place>
  __device__ __forceinline__ float value(float s, const Place&...) const {
    return s * cap.factor(s);
  }
  template <class... Place>
  __device__ __forceinline__ float above(float s, float shift, const Place&...) const {
    return fmaf(s, cap.factor(s), -shift);
  }
  // Of tanh: 0 at infinity, and where a hidden score's tanh is −∞.
  static __device__ __forceinline__ float slope(float tanh) {
    return __saturatef(fmaf(-tanh, tanh, 1.f));
  }

  // Where a score's size beyond the range of the polynomial goes: to where that gives its tanh.
  __device__ __forceinline__ float remapped(float size) const {
    return cap.remapped(exp2_approx(size * cap.log2_u));
  }
  __device__ __forceinline__ float in_reach(float s) const {
    const float size = fabsf(s);  // a NaN stays one
    return size > cap.range ? copysignf(remapped(size), s) : s;
  }

  // OnlineSoftmax::begin_tile of scores as they come; mask() masks them where `masked`, once they
  // are remapped: scores stay raw until the exponentials, and so do maxima.
  template <class Softmax, int N, class Mask>
  static __device__ __forceinline__ bool begin_tile(Softmax& softmax, float (&r_s)[N],
                                                    float (&alpha)[2], bool masked,
                                                    const Mask& mask);
};

static_assert(ScoreMod<ModOf<ScoreKind::kSoftcap>, QueriesByKeys<8>> &&
              KeepsOrder<ModOf<ScoreKind::kSoftcap>>);

// Makes values of scores.
template <class Mod, ScoreView View>
  requires ScoreMod<Mod, View>
__device__ __forceinline__ void apply_mod(const Mod& mod, const View& view,
                                          typename View::Scores& r_s) {
#pragma unroll
  for (int r = 0; r < View::kRows; ++r)
#pragma unroll
    for (int k = 0; k < View::kKeys; ++k) {
      float& s = View::at(r_s, r, k);
      if constexpr (Mod::kRemaps) s = mod.in_reach(s);
      s = mod.value(s, ScorePlace<View>{view, r, k});
    }
}

// Whether one of the scores lies below −range, or is a NaN of that sign.
template <int N>
__device__ __forceinline__ bool any_below(const float (&r_s)[N], float range) {
  uint32_t lowest[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) lowest[c] = max_of_bits<uint32_t>(r_s, c);
  return max(max(lowest[0], lowest[1]), max(lowest[2], lowest[3])) >
         (uint32_t(__float_as_int(range)) | 0x80000000u);
}

// Remaps the scores outside the range of the cap's polynomial; negative ones of row r, of
// QueriesByKeys, only where low[r].
template <int N>
__device__ __forceinline__ void remap_scores(const ModOf<ScoreKind::kSoftcap>& mod, float (&r_s)[N],
                                             const bool (&low)[2]) {
  const float stay_below[2] = {low[0] ? -kInfinity : 0.f, low[1] ? -kInfinity : 0.f};
  // In groups: those without such a score are spared the work, and only one needs registers for it.
  constexpr int kGroup = 8;
#pragma unroll
  for (int group = 0; group < N; group += kGroup) {
    float largest = 0.f;
#pragma unroll
    for (int j = group; j < group + kGroup; ++j) largest = fmaxf(largest, fabsf(r_s[j]));
    if (!(largest > mod.cap.range)) continue;
#pragma unroll
    for (int j = group; j < group + kGroup; ++j) {
      // The others stay, so that no score's bits depend on its neighbours; and NaNs.
      const float size = fabsf(r_s[j]), remapped = mod.remapped(size);
      if (size > mod.cap.range && !(r_s[j] < stay_below[QueriesByKeys<N>::row_of(j)]))
        r_s[j] = copysignf(remapped, r_s[j]);
    }
  }
}

// The same for all rows, after a test of the tile.
template <int N>
__device__ __forceinline__ void remap_tile(const ModOf<ScoreKind::kSoftcap>& mod, float (&r_s)[N]) {
  int highest[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) highest[c] = max_of_bits<int>(r_s, c);
  const bool beyond = max(max(highest[0], highest[1]), max(highest[2], highest[3])) >
                          __float_as_int(mod.cap.range) ||
                      any_below(r_s, mod.cap.range);
  if (__any_sync(~0u, beyond)) remap_scores(mod, r_s, {true, true});
}

// The usual tile has one branch for it all: no score beyond the range, no mask, no maximum raised.
template <class Softmax, int N, class Mask>
__device__ __forceinline__ bool ModOf<ScoreKind::kSoftcap>::begin_tile(
    Softmax& softmax, float (&r_s)[N], float (&alpha)[2], bool masked, const Mask& mask) {
  const auto& score = softmax.score;
  const float range = score.mod.cap.range;
  float largest[2];
  softmax.find_max_above_limit(r_s, largest);
  bool within = (largest[0] <= fminf(softmax.limit(0), range)) &
                (largest[1] <= fminf(softmax.limit(1), range));
  if (softmax.must_remap_negative) within &= !any_below(r_s, range);
  alpha[0] = alpha[1] = 1.f;
  if (!masked && __all_sync(~0u, within)) {
    softmax.keep_largest(largest);
    return false;
  }
  remap_scores(score.mod, r_s,
               {score.must_remap_negative(softmax.row_max[0]),
                score.must_remap_negative(softmax.row_max[1])});
  if (masked) mask();
  softmax.raise_max(r_s, alpha);
  return __any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f);
}

}  // namespace flash3::cuda
