// SPDX-License-Identifier: Apache-2.0
// The scores of FP8 kernels with a softcap.
#pragma once

#include "cuda/device/score/softcap.cuh"
#include "cuda/sm90/forward/kernel_fp8.cuh"

namespace flash3::cuda::sm90 {

// The cap is of scaled scores: scale_scores() scales them, and m is of those. Q's factor is 1: the
// cap's polynomial has the softmax_scale.
template <bool kRowScales>
struct Fp8Score<ScoreKind::kSoftcap, kRowScales> : Score<ScoreKind::kSoftcap> {
  using Capped = Score<ScoreKind::kSoftcap>;
  static constexpr bool kKeepsLargest = false;
  static constexpr float kOffset = kFp8Offset;

  ScoreScale<kRowScales> scale;

  template <class Params>
  static __device__ __forceinline__ Fp8Score of(const Params& params) {
    return {Capped::of(params), {}};
  }

  template <int N>
  __device__ __forceinline__ void scale_scores(float (&r_s)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) r_s[j] *= scale.of_row(j / 2 % 2);
  }

  __device__ __forceinline__ float shift_of(float m) const { return Capped::shift_of(m) - kOffset; }
  // As if shifts had no offset.
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return Capped::max_above(m, shift + kOffset);
  }
};

}  // namespace flash3::cuda::sm90
