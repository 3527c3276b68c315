// SPDX-License-Identifier: Apache-2.0
// Several words at once, in global and in shared memory: accesses that C++ does not have, or that
// the compiler must leave where they stand. PTX ISA 9.7.9.8 ld, 9.7.9.12 st, 9.7.13.8 red,
// 9.7.9.25.4 cp.async.bulk, cp.reduce.async.bulk, wait_group, 9.7.13.4 fence.proxy.
#pragma once

#include "cuda/device/ptx/sync.cuh"

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

// x[0…3] to four consecutive floats at a 16-byte aligned address. The order of concurrent additions
// is not defined.
__device__ __forceinline__ void add_to_global(float* address, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

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
__device__ __forceinline__ uint32_t load_shared_word(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];"
               : "=r"(x)
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
  return x;
}

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

// ---- any number of words, by the copy engine: addresses and sizes are multiples of 16 bytes ----

__device__ __forceinline__ uint64_t global_address(const void* at) {
  return __cvta_generic_to_global(at);
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
      "l"(global_address(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void bulk_store(float* global, const void* shared, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global_address(global)),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

// Adds floats to those there.
__device__ __forceinline__ void bulk_add(float* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   global_address(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Waits until all batches are done, and visible to this thread.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What the copy engine wrote to global memory, before ordinary accesses that follow.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flash3::cuda
