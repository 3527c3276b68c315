// SPDX-License-Identifier: Apache-2.0
// Where a thread stands in its block: warpgroup, warp, lane.
#pragma once

#include "cuda/device/ptx/compiler.cuh"

namespace flash3::cuda {

inline constexpr int kWarpgroupThreads = 128;

// This thread's place in its warpgroup, kept in a register: the compiler would read the special
// register again, slowly, wherever the place is needed.
__device__ __forceinline__ int thread_in_warpgroup() {
  return int(unsigned(hide_from_optimizer(int(threadIdx.x))) % kWarpgroupThreads);
}

// Tells the compiler that a number is the same in the whole warp.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ int warpgroup_index() {
  return uniform(int(threadIdx.x / kWarpgroupThreads));
}
__device__ __forceinline__ int warp_in_warpgroup() { return uniform(int(threadIdx.x / 32 % 4)); }

}  // namespace flash3::cuda
