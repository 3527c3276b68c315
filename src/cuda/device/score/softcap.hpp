// SPDX-License-Identifier: Apache-2.0
// Soft-capped scores, softcap · tanh(x) with x = softmax_scale · s / softcap of a raw score s, by
// multiplications and additions alone: the multi-function unit, which has a tanh, is busy with the
// softmax's exponentials, and its tanh is off by up to 2^-11, 2 % of a weight under a cap of 50.
//
//   tanh(x) ≈ P(x) = x·(a + x²·(b + x²·c))     for |x| ≤ 1/2, within 2^-17.5
//
// A score further out, which is rare, is remapped first: to where P is the tanh of where it was. P
// rises throughout and passes 1 at x = 1.31, so that there is such a place for every tanh, and the
// order of scores stays; and P is nowhere steeper than at 0. The place depends on u = e^(−2|x|)
// alone, by a polynomial: within 2^-17.8. For u = 0 it is a trifle above 1, so that the slope 1 −
// tanh², which saturates, is 0 at infinity.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda {

// What a raw score |s| ≤ range, or one that was remapped, is multiplied with. +∞ for −∞, so that
// a hidden score stays one.
FLASH3_HOST_DEVICE constexpr float Softcap::factor(float s) const {
  const float square = s * s;
  return (c * square + b) * square + a;
}

// Whether the scores below −range of a row must be remapped, as those above range are. Else they
// may stay, as their weights are next to nothing: P makes them too small, and the difference is
// below 2^-28 of 2^shift, where shift is P of one of the row's scores, in base 2; under caps of
// 30 and more below 2^-32.
FLASH3_HOST_DEVICE constexpr bool Softcap::must_remap_negative(float shift) const {
  return !(shift >= 22.f - range * factor(range));
}

// The raw score s > 0 whose P is tanh x, by u of x ≥ 1/2.
FLASH3_HOST_DEVICE constexpr float Softcap::remapped(float u) const {
  const float w = u * 5.43656366f - 1.f;  // u from 0 to 1/e as −1 to 1
  float x = -0.0152345961f;
  x = x * w - 0.000952800969f;
  x = x * w + 0.061187841f;
  x = x * w - 0.010978681f;
  x = x * w - 0.0997933894f;
  x = x * w + 0.0541186333f;
  x = x * w + 0.0731437057f;
  x = x * w - 0.105338484f;
  x = x * w + 0.0278402865f;
  x = x * w + 0.130808547f;
  x = x * w - 0.451999009f;
  return (x * w + 0.837185919f) * raw;
}

// Bounds of softcap, and of softmax_scale / softcap, within which no coefficient leaves the range
// of floats.
inline constexpr float kSmallestSoftcap = 1e-6f, kLargestSoftcap = 1e6f;

// unit: what tanh(x) is to be multiplied with.
constexpr Softcap make_softcap(double softmax_scale, double softcap, double unit) {
  const double x = softmax_scale / softcap;  // of a raw score of 1
  return {float(0.999924839 * x * unit),
          float(-0.330855101 * x * x * x * unit),
          float(0.112541519 * x * x * x * x * x * unit),
          float(0.5 / x),
          float(-2 * kLog2E * x),
          float(1 / x)};
}

}  // namespace flash3::cuda
