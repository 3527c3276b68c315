// SPDX-License-Identifier: Apache-2.0
// Copies of single words to shared memory that no thread waits for. PTX ISA 9.7.9.25.3.1 cp.async,
// 9.7.13.15.17 cp.async.mbarrier.arrive.
#pragma once

#include "hopper/device/ptx/integers.cuh"

namespace flash3::hopper {

__device__ __forceinline__ void copy_async(float* shared, const float* global) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
}

// Arrives when this thread's copies so far have; one of the arrivals that the barrier counts.
__device__ __forceinline__ void arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(
                   uint32_t(__cvta_generic_to_shared(barrier)))
               : "memory");
}

}  // namespace flash3::hopper
