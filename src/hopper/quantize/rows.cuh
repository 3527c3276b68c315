// SPDX-License-Identifier: Apache-2.0
// Sixteen columns of a row in a thread's registers: in from 16-bit elements, out to e4m3. In
// between they are held as eight pairs of 16-bit elements, low column first.
#pragma once

#include "hopper/device/element.cuh"
#include "hopper/quantize/params.h"

namespace flash3::hopper {

inline constexpr int kThreadColumns = 16;
inline constexpr int kPairs = kThreadColumns / 2;

template <Element kElement>
__device__ __forceinline__ float to_float(uint16_t bits) {
  if constexpr (kElement == Element::kBFloat16) {
    return __uint_as_float(uint32_t(bits) << 16);
  } else {
    float x;  // PTX ISA 9.7.9.22, cvt
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
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

// The columns from `column` on; zeros past the end.
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

// {x0, x1, x2, x3} · factor as e4m3, x0 lowest.
__device__ __forceinline__ uint32_t to_e4m3(float x0, float x1, float x2, float x3, float factor) {
  return pack4_e4m3(x0 * factor, x1 * factor, x2 * factor, x3 * factor);
}

// Two, rounded; PTX ISA 9.7.9.22, cvt. Volatile: the compiler would put it off, with the registers
// of both.
__device__ __forceinline__ uint16_t to_e4m3(float x0, float x1) {
  uint16_t codes;
  asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(x0), "f"(x1));
  return codes;
}
__device__ __forceinline__ uint32_t join(uint16_t low, uint16_t high) {
  uint32_t both;
  asm("mov.b32 %0, {%1, %2};" : "=r"(both) : "h"(low), "h"(high));
  return both;
}

// Pairs 2 * i and 2 * i + 1.
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

// The sizes of both halves at least; NaN above all. PTX ISA 9.7.1.12, max.
__device__ __forceinline__ uint32_t larger_sizes(uint32_t sizes, uint32_t pair) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(sizes), "r"(pair & 0x7FFF7FFFu));
  return larger;
}

// max(size, |x|), or NaN. PTX ISA 9.7.3.12, max.
__device__ __forceinline__ float larger_size(float size, float x) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(size), "f"(fabsf(x)));
  return larger;
}

// Two floats as bfloat16 rounded to odd: cut, and the last bit set if that lost anything. e4m3 has
// four bits of its eight, and rounds them as it would the floats.
__device__ __forceinline__ uint32_t pack_odd(float low, float high) {
  const uint32_t a = __float_as_uint(low), b = __float_as_uint(high);
  uint32_t lost;
  asm("min.u16x2 %0, %1, %2;" : "=r"(lost) : "r"(__byte_perm(a, b, 0x5410)), "r"(0x00010001u));
  return __byte_perm(a, b, 0x7632) | lost;
}

}  // namespace flash3::hopper
