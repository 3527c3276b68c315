// SPDX-License-Identifier: Apache-2.0
// Numbers of FP8: conversions (PTX ISA 9.7.9.22, cvt), and what the largest of many elements is
// found with.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"

namespace flash3::cuda {

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

// Two rounded to e4m3; beyond 448 they saturate. Volatile: the compiler would put it off, with the
// registers of both.
__device__ __forceinline__ uint16_t pack2_e4m3(float low, float high) {
  uint16_t packed;
  asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(packed) : "f"(low), "f"(high));
  return packed;
}

// Two e4m3 values, exactly, to two of float16.
__device__ __forceinline__ uint32_t e4m3_to_float16(uint16_t pair) {
  uint32_t packed;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(packed) : "h"(pair));
  return packed;
}

}  // namespace flash3::cuda
