// SPDX-License-Identifier: Apache-2.0
// Loading a warp's matrix fragments from shared memory. PTX ISA 9.7.14.5.15, ldmatrix.
#pragma once

#include "hopper/device/ptx/integers.cuh"

namespace flash3::hopper {

// Four 8×8 matrices of 16-bit elements, each transposed: lane l holds the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace flash3::hopper
