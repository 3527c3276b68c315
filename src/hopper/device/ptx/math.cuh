// Special functions on the multi-function unit.
#pragma once

namespace flash3::hopper {

// 2^x; 2^-inf = 0. PTX ISA 9.7.3.20, ex2.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash3::hopper
