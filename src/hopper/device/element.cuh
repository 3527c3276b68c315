// SPDX-License-Identifier: Apache-2.0
// Fixed-width integers, and rounding to the element types. Values travel as bits (uint16_t, or two
// or four packed in a uint32_t): the tensor cores and TMA take bits, and this keeps the CUDA type
// headers out of every translation unit.
#pragma once

#include <cuda/std/cstdint>

#include "hopper/element.hpp"

namespace flash3::hopper {

using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

// {low, high} rounded to nearest even and packed. PTX ISA 9.7.9.22, cvt.
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

}  // namespace flash3::hopper
