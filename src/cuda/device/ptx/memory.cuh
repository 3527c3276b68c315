// SPDX-License-Identifier: Apache-2.0
// Counters in global memory, and several floats at once, by a thread or by the copy engine. PTX ISA
// 9.7.9.8 ld, 9.7.9.12 st, 9.7.13.8 red, 9.7.9.25.4 cp.async.bulk, cp.reduce.async.bulk,
// wait_group, 9.7.13.4 fence.proxy.
#pragma once

#include "cuda/device/ptx/sync.cuh"

namespace flash3::cuda {

// ---- counters, ordered across the GPU ----

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

// ---- floats of a thread ----

// The compiler would load where the value is needed, after other accesses.
__device__ __forceinline__ float2 load_shared(const float* from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
  return x;
}

__device__ __forceinline__ uint32_t load_shared(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];"
               : "=r"(x)
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(float4* to, const float* x) {
  asm volatile(
      "st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
}

// Computes the first kCount of x, none of them negative, before anything that follows
// (compiler.cuh), by a store that never happens: ptxas moves no store across a wait, and a trap
// over many values costs the pipeline (C7512).
template <int kCount, int N>
__device__ __forceinline__ void order_before(const float (&x)[N], uint32_t* never_written) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits |= __float_as_uint(x[i]);
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.s32 p, %0, 0;\n@p st.volatile.shared.u32 [%1], %0;\n}" ::"r"(bits),
      "r"(uint32_t(__cvta_generic_to_shared(never_written)))
      : "memory");
}

// What lies in memory is loaded again after this point: no registers keep it meanwhile.
__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

// ---- any number of floats, by the copy engine: addresses and sizes are multiples of 16 bytes ----

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
