// SPDX-License-Identifier: Apache-2.0
// Adding to global memory without reading it back. PTX ISA 9.7.13.8, red.
#pragma once

namespace flash3::hopper {

// x[0…3] to four consecutive floats at a 16-byte aligned address. The order of concurrent additions
// is not defined.
__device__ __forceinline__ void add_to_global(float* address, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace flash3::hopper
