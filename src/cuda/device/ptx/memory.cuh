// SPDX-License-Identifier: Apache-2.0
// Accesses to memory that C++ does not have, or that the compiler must leave where they stand. PTX
// ISA 9.7.9.8 ld, 9.7.9.12 st, 9.7.9.15 prefetch, 9.7.13.8 red, 9.7.14.5.15 ldmatrix, 9.7.14.5.16
// stmatrix.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"

namespace flash3::cuda {

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

// Returns what was there.
__device__ __forceinline__ int add_acquire_release(int* address, int value) {
  int old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
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

struct TensorMap;  // cuda/device/types.hpp

// Brings a tensor map into the cache of the copy engine.
__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- shared memory, a warp's matrix fragments ----

// Four 8×8 matrices of 16-bit elements, each transposed: lane l holds the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

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

// Two 8×8 matrices: lanes 0…15 hold addresses.
__device__ __forceinline__ void stmatrix_x2_transposed(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(a), "r"(b)
               : "memory");
}

}  // namespace flash3::cuda
