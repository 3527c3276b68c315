// SPDX-License-Identifier: Apache-2.0
// The softmax of FP8 scores: a tile's raw scores have a scale of their own, so that the maximum of
// a row is kept of scaled ones, in base 2; and weights are multiplied by 2^kFp8Offset before they
// are rounded to e4m3, whose largest number is 448. A weight may exceed the row's maximum so far by
// 2^kFp8Slack before it is raised (online_softmax.cuh): together they must stay below 448. What is
// 2^(6 + kFp8Offset) below the maximum begins to lose bits.
#pragma once

#include "hopper/device/score.cuh"

namespace flash3::hopper {

// In powers of two. What weights are multiplied by, and by how much one may exceed the maximum.
inline constexpr float kFp8Offset = 6.f, kFp8Slack = 2.75f;

// m is in base 2, and shifts leave the offset: as in device/score.cuh.
struct Fp8Maximum {
  static constexpr float kSlack = kFp8Slack, kOffset = kFp8Offset;

  __device__ __forceinline__ float shift_of(float m) const { return m - kOffset; }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return m - kOffset - shift;
  }
  __device__ __forceinline__ float plus(float m, float x) const {
    return fmaf(m - kOffset, 0.693147180559945309f, x);
  }
};

template <ScoreKind>
struct Fp8Score;

template <>
struct Fp8Score<ScoreKind::kPlain> : Fp8Maximum {
  static constexpr bool kCapped = false;

  float scale, inverse;

  template <class Params>
  static __device__ __forceinline__ Fp8Score of(const Params&) {
    return {};
  }

  // q_scale: with softmax_scale · log2 e.
  __device__ __forceinline__ void begin_tile(float q_scale, float k_scale) {
    scale = q_scale * k_scale;
    inverse = reciprocal_approx(scale);
  }

  // As in device/score.cuh.
  __device__ __forceinline__ float log2_above(float s, float shift) const {
    return fmaf(s, scale, -shift);
  }
  __device__ __forceinline__ float limit(float m, float slack) const {
    return (m + slack) * inverse;
  }
  __device__ __forceinline__ float max_of(float largest) const { return largest * scale; }
};

// The cap is of scaled scores: begin_tile() scales them, and m is of those.
template <>
struct Fp8Score<ScoreKind::kSoftcap> : Score<ScoreKind::kSoftcap> {
  using Capped = Score<ScoreKind::kSoftcap>;
  static constexpr float kSlack = kFp8Slack, kOffset = kFp8Offset;

  float scale;

  template <class Params>
  static __device__ __forceinline__ Fp8Score of(const Params& params) {
    return {Capped::of(params), 1.f};
  }

  // q_scale: nothing but Q's; the cap's polynomial has the softmax_scale.
  __device__ __forceinline__ void begin_tile(float q_scale, float k_scale) {
    scale = q_scale * k_scale;
  }
  template <int N>
  __device__ __forceinline__ void scale_scores(float (&r_s)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) r_s[j] *= scale;
  }

  __device__ __forceinline__ float shift_of(float m) const { return Capped::shift_of(m) - kOffset; }
  __device__ __forceinline__ float plus(float m, float x) const {
    return fmaf(shift_of(m), 0.693147180559945309f, x);
  }
  // As if shifts had no offset.
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return Capped::max_above(m, shift + kOffset);
  }
};

}  // namespace flash3::hopper
