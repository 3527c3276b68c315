// SPDX-License-Identifier: Apache-2.0
// What the kernels make of a raw score s = q·k, softmax_scale · s or its soft cap, and in what form
// the online softmax keeps the maximum of a row of either.
#pragma once

#include "hopper/device/kinds.hpp"
#include "hopper/device/ptx/arithmetic.cuh"
#include "hopper/device/softcap_remap.cuh"

namespace flash3::hopper {

template <ScoreKind>
struct Score;

template <>
struct Score<ScoreKind::kPlain> {
  static constexpr bool kCapped = false;
  static constexpr float kSlack = 8.f;  // p stays below 2^8, far from the largest float16

  float softmax_scale;
  float scale_log2;  // softmax_scale · log2 e

  template <class Params>
  static __device__ __forceinline__ Score of(const Params& params) {
    return {params.softmax_scale, params.scale_log2};
  }

  // The score in base 2, less a shift.
  __device__ __forceinline__ float log2_above(float s, float shift) const {
    return fmaf(s, scale_log2, -shift);
  }

  // The maximum m of a row is of raw scores, as a tile's scores are. limit: the largest score of a
  // tile that is within the slack, in base 2, of m. max_of: m, by a tile's largest score.
  __device__ __forceinline__ float limit(float m, float slack) const {
    return m + slack / scale_log2;
  }
  __device__ __forceinline__ float max_of(float largest) const { return largest; }
  __device__ __forceinline__ float shift_of(float m) const { return m * scale_log2; }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return log2_above(m, shift);
  }
  // In natural units, and something added.
  __device__ __forceinline__ float plus(float m, float x) const {
    return fmaf(m, softmax_scale, x);
  }
};

template <>
struct Score<ScoreKind::kSoftcap> {
  static constexpr bool kCapped = true;
  static constexpr float kSlack = 8.f;

  Softcap cap;  // unit: softcap · log2 e

  template <class Params>
  static __device__ __forceinline__ Score of(const Params& params) {
    return {params.softcap};
  }

  // A remapped score, capped, in base 2, less a shift.
  __device__ __forceinline__ float log2_above(float s, float shift) const {
    return fmaf(s, cap.factor(s), -shift);
  }

  // m is of remapped scores, which have the order of capped ones. limit: P is nowhere steeper than
  // at 0.
  __device__ __forceinline__ float limit(float m, float slack) const { return m + slack / cap.a; }
  __device__ __forceinline__ float max_of(float largest) const { return largest; }
  __device__ __forceinline__ float shift_of(float m) const { return m * cap.factor(m); }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return log2_above(m, shift);
  }
  __device__ __forceinline__ float plus(float m, float x) const {
    return fmaf(shift_of(m), 0.693147180559945309f, x);
  }

  // Whether a row's scores below −range must be remapped.
  __device__ __forceinline__ bool must_remap_negative(float m) const {
    return cap.must_remap_negative(shift_of(m));
  }
};

}  // namespace flash3::hopper
