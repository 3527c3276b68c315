// SPDX-License-Identifier: Apache-2.0
// Sixteen columns of a row in a thread's registers, from 16-bit elements to e4m3. A thread holds
// them as eight pairs of 16-bit elements, low column first.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/ptx/e4m3.cuh"
#include "cuda/quantize/params.h"

namespace flash3::cuda {

inline constexpr int kThreadColumns = 16;
inline constexpr int kPairs = kThreadColumns / 2;

template <Element kElement>
__device__ __forceinline__ float to_float(uint16_t bits) {
  if constexpr (kElement == Element::kBFloat16) {
    return bfloat16_to_float(bits);
  } else {
    return float16_to_float(bits);
  }
}
template <Element kElement>
__device__ __forceinline__ float low_float(uint32_t pair) {
  return to_float<kElement>(uint16_t(pair));
}
template <Element kElement>
__device__ __forceinline__ float high_float(uint32_t pair) {
  if constexpr (kElement == Element::kBFloat16) return __uint_as_float(pair & 0xFFFF0000u);
  return to_float<kElement>(uint16_t(pair >> 16));
}

// Loads the columns from `column` on; zeros past the end.
__device__ __forceinline__ void load_wide(const uint16_t* row, int column, int dim, bool valid,
                                          uint32_t (&pairs)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; i += 4) {  // dim is a multiple of 8
    uint4 x{};
    if (valid && column + 2 * i < dim)
      x = __ldg(reinterpret_cast<const uint4*>(row + column + 2 * i));
    pairs[i] = x.x, pairs[i + 1] = x.y, pairs[i + 2] = x.z, pairs[i + 3] = x.w;
  }
}
__device__ __forceinline__ void load_narrow(const uint16_t* row, int column, int dim, bool valid,
                                            bool in_pairs, uint32_t (&pairs)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int c = column + 2 * i;
    uint32_t pair = 0;
    if (valid && c + 1 < dim && in_pairs) {
      pair = __ldg(reinterpret_cast<const uint32_t*>(row + c));
    } else {
      if (valid && c < dim) pair = __ldg(row + c);
      if (valid && c + 1 < dim) pair |= uint32_t(__ldg(row + c + 1)) << 16;
    }
    pairs[i] = pair;
  }
}

// {x0, x1, x2, x3} · factor as e4m3, x0 in the lowest byte.
__device__ __forceinline__ uint32_t to_e4m3(float x0, float x1, float x2, float x3, float factor) {
  return pack4_e4m3(x0 * factor, x1 * factor, x2 * factor, x3 * factor);
}

// The codes of pairs 2 * i and 2 * i + 1.
template <Element kElement>
__device__ __forceinline__ uint32_t word_of(const uint32_t (&pairs)[kPairs], int i, float factor) {
  const uint32_t a = pairs[2 * i], b = pairs[2 * i + 1];
  return to_e4m3(low_float<kElement>(a), high_float<kElement>(a), low_float<kElement>(b),
                 high_float<kElement>(b), factor);
}

template <Element kElement>
__device__ __forceinline__ void store_wide(const uint32_t (&pairs)[kPairs], float factor,
                                           unsigned char* to) {
  *reinterpret_cast<uint4*>(to) = {
      word_of<kElement>(pairs, 0, factor), word_of<kElement>(pairs, 1, factor),
      word_of<kElement>(pairs, 2, factor), word_of<kElement>(pairs, 3, factor)};
}
template <Element kElement>
__device__ __forceinline__ void store_narrow(const uint32_t (&pairs)[kPairs], float factor,
                                             unsigned char* row, int column, int dim,
                                             bool in_words) {
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i) {
    const uint32_t word = word_of<kElement>(pairs, i, factor);
    const int c = column + 4 * i;
    if (in_words && c + 4 <= dim) {
      *reinterpret_cast<uint32_t*>(row + c) = word;
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (c + j < dim) row[c + j] = static_cast<unsigned char>(word >> (8 * j));
  }
}

// The larger of `sizes` and the pair's elements without their signs; NaN is above all.
__device__ __forceinline__ uint32_t larger_sizes(uint32_t sizes, uint32_t pair) {
  return max_u16x2(sizes, pair & 0x7FFF7FFFu);
}

// max(size, |x|), or NaN.
__device__ __forceinline__ float larger_size(float size, float x) {
  return max_nan(size, fabsf(x));
}

// Two floats as bfloat16 rounded to odd: cut off, with the last bit set if that lost anything. e4m3
// keeps four of bfloat16's eight bits, so it rounds them as it would round the floats.
__device__ __forceinline__ uint32_t pack_odd(float low, float high) {
  const uint32_t a = __float_as_uint(low), b = __float_as_uint(high);
  const uint32_t lost = min_u16x2(__byte_perm(a, b, 0x5410), 0x00010001u);
  return __byte_perm(a, b, 0x7632) | lost;
}

}  // namespace flash3::cuda
