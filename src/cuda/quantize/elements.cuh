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

// Rotary embedding and rotation of a row, in registers and by shuffles. Both round every sum and
// product as the CPU backend does and in its order, so that both backends give the same bits.

// ---- rotary ----

template <Element kElement>
__device__ __forceinline__ float load_angle(const void* table, long long at, bool is_float) {
  if (is_float) return __ldg(static_cast<const float*>(table) + at);
  return to_float<kElement>(__ldg(static_cast<const uint16_t*>(table) + at));
}

// Applies the rotary embedding to x, the columns of `row` from `column` on.
template <Element kElement>
__device__ __forceinline__ void apply_rope(const RotaryTables& tables, long long position,
                                           const uint16_t* row, int column,
                                           float (&x)[kThreadColumns]) {
  const auto cos = [&](int i) {
    return load_angle<kElement>(tables.cos, position * tables.stride_cos + i, tables.is_float);
  };
  const auto sin = [&](int i) {
    return load_angle<kElement>(tables.sin, position * tables.stride_sin + i, tables.is_float);
  };
  if (tables.interleaved) {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += 2) {
      const int pair = (column + i) / 2;
      if (pair >= tables.half) continue;
      const float c = cos(pair), s = sin(pair), a = x[i], b = x[i + 1];
      x[i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
      x[i + 1] = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kThreadColumns; ++i) {
    const int at = column + i;
    if (at >= 2 * tables.half) continue;
    const bool first = at < tables.half;
    // Some other lane holds the pair's other element, in any register: this one is read again.
    const int pair = first ? at : at - tables.half, other = first ? at + tables.half : pair;
    const float c = cos(pair), s = sin(pair), y = to_float<kElement>(__ldg(row + other));
    const float by_cos = __fmul_rn(x[i], c), by_sin = __fmul_rn(y, s);
    x[i] = first ? __fsub_rn(by_cos, by_sin) : __fadd_rn(by_sin, by_cos);
  }
}

// ---- rotation ----

// The factor of dimension i < dim. The first bit in which i and dim differ is the size of its
// transform: see rotation_part.
__device__ __forceinline__ float rotation_factor(int dim, int i) {
  return rotation_factor(31 - __clz(dim ^ i));
}

// Loads the signs D of a thread's columns as pairs of sign bits.
__device__ __forceinline__ void load_signs(const QuantizeParams& params, int column,
                                           uint32_t (&signs)[kPairs]) {
  const uint32_t bits = params.signs[column / 32] >> (column % 32);
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    signs[i] = (bits >> (2 * i) & 1) << 15 | (bits >> (2 * i + 1) & 1) << 31;
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// One step of all transforms, between columns kStep apart. The transforms that are larger than
// kStep have the columns before dim & -(2 * kStep). kOwn: columns of a thread.
template <int kStep, bool kWhole, int kOwn>
__device__ __forceinline__ void step_in_thread(int column, int dim, float (&x)[kOwn]) {
  const int end = dim & -(2 * kStep);
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    if ((i & kStep) == 0 && (kWhole || column + i < end)) butterfly(x[i], x[i + kStep]);
}
template <int kStep, int kOwn>
__device__ __forceinline__ void step_in_warp(int column, int dim, float (&x)[kOwn]) {
  const int end = dim & -(2 * kStep);
  if (end == 0) return;
  const float sign = (column & kStep) ? -1.f : 1.f;
  const auto joined = [&](float mine) {
    // The product is exact.
    return fmaf(sign, mine, __shfl_xor_sync(~0u, mine, kStep / kOwn));
  };
  if (end == dim) {
#pragma unroll
    for (float& each : x) each = joined(each);
  } else {
#pragma unroll
    for (float& each : x) {
      const float sum = joined(each);
      each = column < end ? sum : each;
    }
  }
}

// Applies H/√n to a row whose signs D has changed; zeros past dim stay. A whole warp calls this.
// kWhole: dim is a multiple of a thread's columns, kOwn.
template <int kColumns, bool kWhole, int kOwn>
__device__ __forceinline__ void rotate(int column, int dim, float factor, float (&x)[kOwn]) {
  static_assert(kOwn == 8 || kOwn == 16);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (!kWhole && column + i < dim) factor = rotation_factor(dim, column + i);
    x[i] = __fmul_rn(x[i], factor);
  }
  step_in_thread<1, kWhole>(column, dim, x);
  step_in_thread<2, kWhole>(column, dim, x);
  step_in_thread<4, kWhole>(column, dim, x);
  if constexpr (kOwn == 16)
    step_in_thread<8, kWhole>(column, dim, x);
  else
    step_in_warp<8>(column, dim, x);
  step_in_warp<16>(column, dim, x);
  step_in_warp<32>(column, dim, x);
  if constexpr (kColumns > 64) step_in_warp<64>(column, dim, x);
  if constexpr (kColumns > 128) step_in_warp<128>(column, dim, x);
}

}  // namespace flash3::cuda
