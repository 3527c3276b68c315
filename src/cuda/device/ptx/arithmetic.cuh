// SPDX-License-Identifier: Apache-2.0
// Numbers: fixed-width integers, special functions on the multi-function unit, minima and maxima,
// conversions between float and the element types.
//
// Values of the element types travel as bits (uint16_t, or two or four packed in a uint32_t): the
// tensor cores and TMA take bits, and this keeps the CUDA type headers out of every translation
// unit.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

#include "cuda/device/types.hpp"

namespace flash3::cuda {

inline constexpr float kLn2 = 0.693147180559945309f;

#if defined(__CUDACC_RTC__)  // NVRTC has no <cstdint>
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#endif

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);  // NVRTC has no HUGE_VALF

// 2^x; 2^-inf = 0. PTX ISA 9.7.3.20, ex2.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x, 1 ulp. PTX ISA 9.7.3.13, rcp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 x, within 2^-22, or 2^-22 of it. PTX ISA 9.7.3.18, lg2.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ln x, as exact.
__device__ __forceinline__ float log_approx(float x) { return log2_approx(x) * kLn2; }

// ---- conversions: PTX ISA 9.7.9.22, cvt ----

// {low, high} rounded to nearest even and packed.
template <Element T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t packed;
  if constexpr (T == Element::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

__device__ __forceinline__ uint32_t pack2(uint16_t low, uint16_t high) {
  uint32_t packed;
  asm("mov.b32 %0, {%1, %2};" : "=r"(packed) : "h"(low), "h"(high));
  return packed;
}

__device__ __forceinline__ float float16_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ float bfloat16_to_float(uint16_t bits) {
  return __uint_as_float(uint32_t(bits) << 16);
}

// Four, the first in the lowest byte, rounded to e4m3; beyond 448 they saturate.
__device__ __forceinline__ uint32_t pack4_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

}  // namespace flash3::cuda
