// SPDX-License-Identifier: Apache-2.0
// Waiting for other threads, and for other kernels. PTX ISA 9.7.13.1 bar, 9.7.13.13 griddepcontrol.
#pragma once

namespace flash3::hopper {

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

}  // namespace flash3::hopper
