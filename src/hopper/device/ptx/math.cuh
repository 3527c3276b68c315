// SPDX-License-Identifier: Apache-2.0
// Special functions on the multi-function unit, and minima and maxima.
#pragma once

#include "hopper/device/ptx/integers.cuh"

namespace flash3::hopper {

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

// ln x, within 2^-22 of |log2 x|. PTX ISA 9.7.3.18, lg2.
__device__ __forceinline__ float log_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y * 0.693147180559945309f;
}

// max(x, y), or NaN if either is. PTX ISA 9.7.3.12, max.
__device__ __forceinline__ float max_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// The larger, or smaller, of each half: pairs of unsigned 16-bit integers. PTX ISA 9.7.1.11
// min, 9.7.1.12 max.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t x, uint32_t y) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}

__device__ __forceinline__ uint32_t min_u16x2(uint32_t x, uint32_t y) {
  uint32_t smaller;
  asm("min.u16x2 %0, %1, %2;" : "=r"(smaller) : "r"(x), "r"(y));
  return smaller;
}

}  // namespace flash3::hopper
