// SPDX-License-Identifier: Apache-2.0
// Rotary embedding and rotation of a row, in registers and by shuffles. Both round every sum and
// product as the CPU backend does and in its order, so that both backends give the same bits.
#pragma once

#include "cuda/quantize/elements.cuh"

namespace flash3::cuda {

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
