// SPDX-License-Identifier: Apache-2.0
// The hardware's sixteen barriers of a block; __syncthreads uses id 0. PTX ISA 9.7.13.1, bar.
#pragma once

namespace flash3::hopper {

// Waits until `threads` threads in all, waiting and arriving, have come.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash3::hopper
