// SPDX-License-Identifier: Apache-2.0
// A row's results of different keys, and the one arithmetic that merges them: a split's, a warp's,
// a warpgroup's, a call's. A partial has the number m that its weights are counted from, no lower
// than its largest score by much, l = Σ e^(s − m) and O = Σ e^(s − m)·v, e being the base of the
// scores; m is −∞ if it saw no key. Then
//
//   m = max(m₁, m₂)    l = l₁·e^(m₁ − m) + l₂·e^(m₂ − m)    O = O₁·e^(m₁ − m) + O₂·e^(m₂ − m)
//
// Floating point makes the order count: who merges fixes it. Where partials lie and who waits for
// whom is the kernels'. The log-sum-exp of normalised rows is an m with l = 1. Host and device.
#pragma once

#include "core/arithmetic.hpp"

namespace flash3::cuda {

inline constexpr float kNoKey = __builtin_bit_cast(float, 0xff800000);  // −∞

// What numbers of two partials are multiplied by.
struct MergeWeights {
  float left, right;
};

// As fmaxf: a NaN is not larger.
FLASH3_HOST_DEVICE inline float larger_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return __builtin_fmaxf(a, b);
#endif
}

// What weights of merged partials are counted from: 0 in the place of −∞, so that partials without
// a key weigh 0 and are no NaN.
FLASH3_HOST_DEVICE inline float merge_origin(float max) { return max == kNoKey ? 0.f : max; }

// What a partial weighs beside others with this origin; exp: e^x.
template <class Exp>
FLASH3_HOST_DEVICE inline float merge_weight(float max, float origin, const Exp& exp) {
  return exp(max - origin);
}

// Merges another partial's m into one's.
template <class Exp>
FLASH3_HOST_DEVICE inline MergeWeights merge_max(float& max, float other, const Exp& exp) {
  const float larger = larger_of(max, other), origin = merge_origin(larger);
  const MergeWeights weights = {merge_weight(max, origin, exp), merge_weight(other, origin, exp)};
  max = larger;
  return weights;
}

// l, or an element of O.
FLASH3_HOST_DEVICE inline float merge_element(float x, float other, const MergeWeights& weights) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(x, weights.left, __fmul_rn(other, weights.right));
#else
  return __builtin_fmaf(x, weights.left, other * weights.right);
#endif
}

// A thread's N elements of a row's partial. Of no key to begin with.
template <int N>
struct Partial {
  float out[N] = {}, max = kNoKey, sum = 0.f;

  template <class Exp>
  FLASH3_HOST_DEVICE inline void merge(const Partial& other, const Exp& exp) {
    const MergeWeights weights = merge_max(max, other.max, exp);
    sum = merge_element(sum, other.sum, weights);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < N; ++i) out[i] = merge_element(out[i], other.out[i], weights);
  }
};

}  // namespace flash3::cuda
