// SPDX-License-Identifier: Apache-2.0
// Accesses to memory that C++ does not have, or that the compiler must leave where they stand. PTX
// ISA 9.7.9.8 ld, 9.7.9.12 st, 9.7.9.15 prefetch, 9.7.9.25.3.1 cp.async, 9.7.13.8 red, 9.7.13.15.17
// cp.async.mbarrier.arrive, 9.7.14.5.15 ldmatrix, 9.7.14.5.16 stmatrix.
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

// ---- global memory, in no order ----

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

// x[0…3] to four consecutive floats at a 16-byte aligned address. The order of concurrent additions
// is not defined.
__device__ __forceinline__ void add_to_global(float* address, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

struct TensorMap;  // cuda/device/views.h

// Brings a tensor map into the cache of the copy engine.
__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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

// ---- copies from global to shared memory that no thread waits for ----

// 16 bytes, of which those behind the first `bytes` are not read, and become 0.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   uint32_t(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_async(float* shared, const float* global) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
}

// Until this thread's copies are there.
__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// 16 bytes of shared memory.
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

// Arrives when this thread's copies so far have; one of the arrivals that the barrier counts.
__device__ __forceinline__ void arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(
                   uint32_t(__cvta_generic_to_shared(barrier)))
               : "memory");
}

}  // namespace flash3::cuda
