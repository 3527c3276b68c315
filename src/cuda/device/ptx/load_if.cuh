// SPDX-License-Identifier: Apache-2.0
// Loads under a predicate. PTX ISA 9.7.9.9, ld.global.nc.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"

namespace flash3::cuda {

// An element of global memory that nobody writes meanwhile, 0 if not `exists`: by one instruction
// under a predicate, where a branch would make each load wait for the one before.
__device__ __forceinline__ float load_if(bool exists, const float* from) {
  float x;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.f32 %0, [%1];\n}"
      : "=f"(x)
      : "l"(from), "r"(int(exists)));
  return x;
}
__device__ __forceinline__ uint16_t load_if(bool exists, const uint16_t* from) {
  uint16_t x;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.nc.u16 %0, [%1];\n}"
      : "=h"(x)
      : "l"(from), "r"(int(exists)));
  return x;
}

}  // namespace flash3::cuda
