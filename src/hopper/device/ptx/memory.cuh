// SPDX-License-Identifier: Apache-2.0
// Ordered accesses to global memory across the GPU. PTX ISA 9.7.9.8 ld, 9.7.9.12 st, 9.7.13.8 red.
#pragma once

namespace flash3::hopper {

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

}  // namespace flash3::hopper
