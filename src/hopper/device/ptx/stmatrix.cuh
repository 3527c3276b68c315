// SPDX-License-Identifier: Apache-2.0
// Storing a warp's matrix fragments to shared memory. PTX ISA 9.7.14.5.16, stmatrix.
#pragma once

#include "hopper/device/ptx/integers.cuh"

namespace flash3::hopper {

// Four 8×8 matrices of 16-bit elements: lane l holds the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same, each matrix stored transposed.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, uint32_t a, uint32_t b,
                                                       uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

}  // namespace flash3::hopper
