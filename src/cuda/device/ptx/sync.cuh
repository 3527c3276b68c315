// SPDX-License-Identifier: Apache-2.0
// Waiting for other threads, for the copy engine, for other blocks and for other kernels. PTX ISA
// 9.7.13.1 bar, 9.7.13.4 fence.mbarrier_init, 9.7.13.13 griddepcontrol, 9.7.13.15 mbarrier, 9.7.9.8
// ld, 9.7.9.12 st. Counters in global memory: memory.cuh.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"

namespace flash3::cuda {

// ---- mbarriers: in shared memory, they count arrivals and bytes ----

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return uint32_t(__cvta_generic_to_shared(at));
}

// By one thread; each phase completes with so many arrivals.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Makes barriers that this thread has initialised known to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// By a predicate, not a branch, around which no product could be under way.
__device__ __forceinline__ void arrive_if(bool arrives, uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.b32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(int(arrives))
      : "memory");
}

// One arrival, and the bytes that TMA will write before the phase completes.
__device__ __forceinline__ void arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Whether the phase of this parity has completed; waits for a while.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t completed;
  asm volatile(
      "{\n"
      ".reg .pred completed;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 completed, [%1], %2;\n"
      "selp.b32 %0, 1, 0, completed;\n"
      "}"
      : "=r"(completed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return completed != 0;
}

// True in exactly one lane; all lanes of the warp call it. After a comparison of thread numbers the
// compiler would loop over the lanes; after elect.sync it does not.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// ---- the hardware's sixteen barriers of a block; __syncthreads uses id 0 ----

// Waits until `threads` threads in all, waiting and arriving, have come.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// As named_barrier_sync; whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool says_so) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\n"
      "barrier.cta.red.or.aligned.pred q, %2, %3, p;\nselp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(int(says_so)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// ---- a ticket in global memory, ordered across the GPU ----

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* address) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(unsigned long long* address,
                                              unsigned long long value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// ---- kernels of one stream that overlap (programmatic dependent launch) ----

// Lets the next kernel of the stream be launched as soon as all blocks have come here or ended.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has ended and what it wrote is visible. Every block of a
// kernel launched as dependent must come here before it touches what others wrote.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash3::cuda
