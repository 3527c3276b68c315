// SPDX-License-Identifier: Apache-2.0
// A warp's products of matrices in registers, and their fragments, beside those of wgmma.cuh. PTX
// ISA 9.7.15.5.8 mma.m16n8k16, 9.7.14.5.15 ldmatrix, 9.7.14.5.16 stmatrix.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/types.hpp"

namespace flash3::cuda {

// Four 8×8 matrices of 16-bit elements: lane l holds the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Two 8×8 matrices: lanes 0…15 hold addresses.
__device__ __forceinline__ void stmatrix_x2_transposed(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(a), "r"(b)
               : "memory");
}

// a·b + c, float32 sums. Lane l, with g = l / 4 and t = l % 4, holds
//   a      rows g and g + 8, columns {2t, 2t + 1} and then {2t + 8, 2t + 9}
//   b      rows {2t, 2t + 1} and {2t + 8, 2t + 9}, column g
//   c, d   rows g and g + 8, columns {2t, 2t + 1}
template <Element T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], const float (&c)[4]) {
#define FLASH3_MMA(type)                                                                      \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                         \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                          \
               "{%10, %11, %12, %13};"                                                        \
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), \
                 "f"(c[1]), "f"(c[2]), "f"(c[3]))
  if constexpr (T == Element::kFloat16) {
    FLASH3_MMA("f16");
  } else {
    FLASH3_MMA("bf16");
  }
#undef FLASH3_MMA
}

}  // namespace flash3::cuda
