// Who does what in a block. Warpgroup 0 produces: one thread of each of its warps drives one stream
// of TMA loads, or hands out the work tiles. Warpgroups 1… consume: 64 query rows each, GEMMs and
// softmax.
#pragma once

namespace flash3::hopper {

inline constexpr int kWarpgroupThreads = 128;

enum class ProducerWarp : int { kLoadQ = 0, kLoadK = 1, kLoadV = 2, kSchedule = 3 };
// In the backward the loaders bring what goes with their name too, K and the LSE, V and delta; from
// kAddDq on there is a warp for each consumer warpgroup.
enum class BackwardProducerWarp : int { kLoadQ = 0, kLoadDout = 1, kAddDq = 2 };

// This thread's place in its warpgroup, kept in a register: the compiler would read the special
// register again, slowly, wherever the place is needed.
__device__ __forceinline__ int thread_in_warpgroup() {
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return int(thread % kWarpgroupThreads);
}

__device__ __forceinline__ int warpgroup_index() {
  return __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
}
__device__ __forceinline__ int warp_in_warpgroup() {
  return __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
}

}  // namespace flash3::hopper
