// SPDX-License-Identifier: Apache-2.0
// 16 bytes at once, in global and in shared memory: accesses that C++ does not have, or that the
// compiler must leave where they stand. PTX ISA 9.7.9.8 ld, 9.7.9.12 st.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"

namespace flash3::cuda {

// 16 bytes that are stored and loaded as one: whoever loads sees all of a store, or nothing.
struct alignas(16) Bits128 {
  unsigned long long low, high;
};

__device__ __forceinline__ Bits128 load_relaxed(const Bits128* address) {
  Bits128 x;
  asm volatile("{\n.reg .b128 x;\nld.relaxed.gpu.global.b128 x, [%2];\nmov.b128 {%0, %1}, x;\n}"
               : "=l"(x.low), "=l"(x.high)
               : "l"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_relaxed(Bits128* address, const Bits128& x) {
  asm volatile(
      "{\n.reg .b128 x;\nmov.b128 x, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], x;\n}" ::"l"(
          address),
      "l"(x.low), "l"(x.high)
      : "memory");
}

// Loads again each time.
__device__ __forceinline__ void load_shared_volatile(const uint4* from, uint32_t (&r)[2][2]) {
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0][0]), "=r"(r[0][1]), "=r"(r[1][0]), "=r"(r[1][1])
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

}  // namespace flash3::cuda
