// SPDX-License-Identifier: Apache-2.0
// Who does what in a block. Warpgroup 0 produces: one thread of each of its warps drives one stream
// of TMA loads, or hands out the work tiles. Warpgroups 1… consume: 64 query rows each, GEMMs and
// softmax.
#pragma once

namespace flash3::hopper {

inline constexpr int kWarpgroupThreads = 128;

enum class ProducerWarp : int { kLoadQ = 0, kLoadK = 1, kLoadV = 2, kSchedule = 3 };
// FP8: one thread loads everything, and two warps transpose V.
enum class Fp8ProducerWarp : int { kLoad = 0, kSchedule = 1, kTranspose = 2 };
inline constexpr int kTransposeThreads = 64;
// In the backward the loaders bring what goes with their name too, K and the LSE, V and delta; from
// kAddDq on there is a warp for each consumer warpgroup.
enum class BackwardProducerWarp : int { kLoadQ = 0, kLoadDout = 1, kAddDq = 2 };

// A number of which the compiler knows nothing: what follows from it is computed where it is
// needed, and not ahead of a loop that has no registers for it.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// This thread's place in its warpgroup, kept in a register: the compiler would read the special
// register again, slowly, wherever the place is needed.
__device__ __forceinline__ int thread_in_warpgroup() {
  return int(unsigned(opaque(int(threadIdx.x))) % kWarpgroupThreads);
}

// Tells the compiler that a number is the same in the whole warp.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ int warpgroup_index() {
  return uniform(int(threadIdx.x / kWarpgroupThreads));
}
__device__ __forceinline__ int warp_in_warpgroup() { return uniform(int(threadIdx.x / 32 % 4)); }

}  // namespace flash3::hopper
