// SPDX-License-Identifier: Apache-2.0
// Conversions between float and the element types. PTX ISA 9.7.9.22, cvt.
#pragma once

#include "hopper/device/element.hpp"
#include "hopper/device/ptx/integers.cuh"

namespace flash3::hopper {

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

// The same for two. Volatile: the compiler would put it off, with the registers of both.
__device__ __forceinline__ uint16_t pack2_e4m3(float low, float high) {
  uint16_t packed;
  asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(packed) : "f"(low), "f"(high));
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

}  // namespace flash3::hopper
