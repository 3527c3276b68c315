// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that no thread waits for. PTX ISA 9.7.9.25.3.1 cp.async,
// 9.7.13.15.17 cp.async.mbarrier.arrive.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"

namespace flash3::cuda {

// 16 bytes, of which those after the first `bytes` are not read, and become 0.
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

// Arrives when this thread's copies so far have; one of the arrivals that the barrier counts.
__device__ __forceinline__ void arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(
                   uint32_t(__cvta_generic_to_shared(barrier)))
               : "memory");
}

}  // namespace flash3::cuda
