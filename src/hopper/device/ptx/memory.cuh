// SPDX-License-Identifier: Apache-2.0
// Accesses to memory that the compiler must leave where they stand. PTX ISA 9.7.9.8 ld, 9.7.9.12
// st, 9.7.9.15 prefetch, 9.7.13.8 red.
#pragma once

#include "hopper/device/ptx/integers.cuh"

namespace flash3::hopper {

// ---- global memory, ordered across the GPU ----

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* address) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(unsigned long long* address,
                                              unsigned long long value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// x if the value there was `from`. Returns what was there.
__device__ __forceinline__ int exchange_if(int* address, int from, int x) {
  int old;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(address), "r"(from), "r"(x)
               : "memory");
  return old;
}

// ---- shared memory ----

// The compiler would load where the value is needed, behind other accesses.
__device__ __forceinline__ float2 load_shared(const float* from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
  return x;
}

// Loads again each time.
__device__ __forceinline__ void load_shared_volatile(const uint4* from, uint32_t (&r)[2][2]) {
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0][0]), "=r"(r[0][1]), "=r"(r[1][0]), "=r"(r[1][1])
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
}

__device__ __forceinline__ void store_shared(float4* to, const float* x) {
  asm volatile(
      "st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
}

}  // namespace flash3::hopper
