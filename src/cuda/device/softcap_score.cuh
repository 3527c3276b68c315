// SPDX-License-Identifier: Apache-2.0
// Soft-capped scores, and their online softmax. c·s − c·m is P(s) − P(m) here, and what P is beyond
// its range is settled before (device/softcap.hpp): scores stay raw until the exponentials, and so
// does m.
#pragma once

#include "cuda/device/online_softmax.cuh"
#include "cuda/device/softcap_remap.cuh"

namespace flash3::cuda {

template <>
struct Score<ScoreKind::kSoftcap> {
  static constexpr bool kCapped = true;

  Softcap cap;  // unit: softcap · log2 e
  float slack;

  template <class Params>
  static __device__ __forceinline__ Score of(const Params& params) {
    return {params.softcap, params.score_slack};
  }

  // A remapped score, capped, in base 2, less a shift.
  __device__ __forceinline__ float log2_above(float s, float shift, int) const {
    return fmaf(s, cap.factor(s), -shift);
  }

  // m is of remapped scores, which have the order of capped ones. limit: P is nowhere steeper than
  // at 0.
  __device__ __forceinline__ float limit(float m) const { return m + slack; }
  __device__ __forceinline__ float max_of(float largest, int) const { return largest; }
  __device__ __forceinline__ float shift_of(float m) const { return m * cap.factor(m); }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return fmaf(m, cap.factor(m), -shift);
  }

  // Whether a row's scores below −range must be remapped.
  __device__ __forceinline__ bool must_remap_negative(float m) const {
    return cap.must_remap_negative(shift_of(m));
  }
};

// OnlineSoftmax::begin_tile of scores as they come; mask() masks them where `masked`, once they are
// remapped. The usual tile has one branch for it all: no score beyond the range, no mask, no
// maximum raised.
template <class Score, int N, class Mask>
__device__ __forceinline__ bool begin_capped_tile(OnlineSoftmax<Score>& softmax, float (&r_s)[N],
                                                  float (&alpha)[2], bool masked,
                                                  const Mask& mask) {
  const Score& score = softmax.score;
  const float range = score.cap.range;
  float largest[2];
  softmax.find_max_above_limit(r_s, largest);
  bool within = (largest[0] <= fminf(softmax.limit(0), range)) &
                (largest[1] <= fminf(softmax.limit(1), range));
  if (softmax.must_remap_negative) within &= !any_below(r_s, range);
  alpha[0] = alpha[1] = 1.f;
  if (!masked && __all_sync(~0u, within)) return false;
  remap_scores(score.cap, r_s,
               {score.must_remap_negative(softmax.row_max[0]),
                score.must_remap_negative(softmax.row_max[1])});
  if (masked) mask();
  softmax.raise_max(r_s, alpha);
  return __any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f);
}

}  // namespace flash3::cuda
