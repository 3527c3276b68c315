// SPDX-License-Identifier: Apache-2.0
// FP8 as flash3 uses it: e4m3 (OCP e4m3fn: 4 exponent bits of bias 7, 3 of mantissa, largest 448,
// no infinity, NaN 0x7F and 0xFF), and the scales that go with it. Compiled on the host and,
// through NVRTC too, on the device: nothing of std:: here.
#pragma once

#include "core/arithmetic.hpp"
#include "core/scales.hpp"
#include "core/seq_info.hpp"

namespace flash3 {

inline constexpr float kE4m3Max = 448.f;
inline constexpr unsigned char kE4m3Nan = 0x7F;

// What weights are multiplied by before they become e4m3: the largest, 1, takes 256, so that those
// down to 2^-14 keep all their bits.
inline constexpr float kE4m3WeightScale = 256.f;

FLASH3_HOST_DEVICE constexpr unsigned float_bits(float x) {
  return __builtin_bit_cast(unsigned, x);
}
FLASH3_HOST_DEVICE constexpr float float_of(unsigned bits) {
  return __builtin_bit_cast(float, bits);
}

FLASH3_HOST_DEVICE constexpr float e4m3_to_float(unsigned char code) {
  const unsigned sign = (code & 0x80u) << 24, size = code & 0x7Fu;
  if (size == kE4m3Nan) return float_of(sign | 0x7FC00000u);
  // Below 2^-6 the mantissa counts steps of 2^-9.
  const float value =
      size < 8 ? static_cast<float>(size) * 0x1p-9f : float_of((size << 20) + (120u << 23));
  return float_of(sign | float_bits(value));
}

// To nearest even; what is above 448 becomes 448, infinity too; NaN becomes kE4m3Nan. As
// cvt.rn.satfinite.e4m3x2.f32 does.
FLASH3_HOST_DEVICE constexpr unsigned char float_to_e4m3(float x) {
  const unsigned bits = float_bits(x), size = bits & 0x7FFFFFFFu, sign = (bits >> 24) & 0x80u;
  if (size > 0x7F800000u) return kE4m3Nan;
  unsigned code = 0x7E;
  if (size < float_bits(0x1p-6f))
    // 16384 has steps of 2^-9: the sum rounds to them, and counts them in its low bits.
    code = float_bits(float_of(size) + 16384.f) - float_bits(16384.f);
  else if (size < float_bits(kE4m3Max))
    code = ((size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
  return static_cast<unsigned char>(sign | code);
}

// The smallest power of two for which no element of size up to `amax` is above 448: scaling by it
// rounds nothing, and a finer scale would gain nothing, as e4m3 is a floating-point format itself.
// Its reciprocal is a normal number too. amax 0: 1. An amax that is not finite: NaN.
FLASH3_HOST_DEVICE constexpr float scale_of_amax(float amax) {
  const unsigned bits = float_bits(amax);
  if (bits == 0) return 1.f;
  if (bits >= 0x7F800000u) return float_of(0x7FC00000u);
  // 448 = 1.75 · 2^8.
  const int above = (bits & 0x7FFFFFu) > 0x600000u ? 1 : 0;
  const int exponent = static_cast<int>(bits >> 23) - 8 + above;
  return float_of(static_cast<unsigned>(exponent < 1 ? 1 : exponent) << 23);
}

// 1 / scale, exact, for a scale of scale_of_amax(); NaN for NaN.
FLASH3_HOST_DEVICE constexpr float reciprocal_of_scale(float scale) {
  const unsigned bits = float_bits(scale);
  return bits >= 0x7F800000u ? scale : float_of((254u << 23) - bits);
}

// The same of a sequence of a call.
FLASH3_HOST_DEVICE constexpr Index scale_block(const Sequences& sequences, const RowRange& rows,
                                               Index b, Index row) {
  return scale_block(sequences.packed, rows.first, b, row);
}

FLASH3_HOST_DEVICE constexpr RowScales row_scales(const ScaleView& scale,
                                                  const Sequences& sequences, const RowRange& rows,
                                                  Index b, Index head) {
  return row_scales(scale, sequences.packed, rows.first, b, head);
}

// Blocks of all sequences of one batch element, or of a packed tensor.
FLASH3_HOST_DEVICE constexpr Index scale_blocks(const Sequences& sequences, Index batch) {
  return sequences.packed ? sequences.rows / kScaleBlock + batch
                          : ceil_div(sequences.rows, kScaleBlock);
}

}  // namespace flash3
