// The softmax of FP8 scores: a tile's raw scores have a scale of their own, so that the maximum of
// a row is kept of scaled ones, in base 2; and weights are multiplied by 2^kOffset before they are
// rounded to e4m3, whose largest number is 448. A weight may exceed the row's maximum so far by
// 2^kSlack before it is raised (online_softmax.cuh): together they must stay below 448, and what is
// 2^(9 + kOffset) below the maximum begins to lose bits.
#pragma once

#include "hopper/device/score.cuh"

namespace flash3::hopper {

template <ScoreKind>
struct Fp8Score;

template <>
struct Fp8Score<ScoreKind::kPlain> {
  static constexpr bool kCapped = false;
  static constexpr float kOffset = 6.f, kSlack = 2.75f;

  float scale, inverse;

  // q_scale: with softmax_scale · log2 e.
  __device__ __forceinline__ void begin_tile(float q_scale, float k_scale) {
    scale = q_scale * k_scale;
    inverse = reciprocal_approx(scale);
  }

  // As in device/score.cuh.
  __device__ __forceinline__ float log2_above(float s, float shift) const {
    return fmaf(s, scale, -shift);
  }
  __device__ __forceinline__ float limit(float m, float, float slack) const {
    return (m + slack) * inverse;
  }
  __device__ __forceinline__ float max_of(float largest, float) const { return largest * scale; }
  __device__ __forceinline__ float shift_of(float m) const { return m - kOffset; }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return m - kOffset - shift;
  }
  __device__ __forceinline__ float plus(float m, float x) const {
    return fmaf(m - kOffset, 0.693147180559945309f, x);
  }
};

}  // namespace flash3::hopper
