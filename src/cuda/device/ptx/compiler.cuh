// SPDX-License-Identifier: Apache-2.0
// What the compiler must be told of registers. It knows nothing of asynchronous instructions, which
// still read or write registers after the place where they stand.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"

namespace flash3::cuda {

// Keeps what the compiler does with a wgmma operand on its side of this place: the last use before
// the wgmma, or the first one after the wait.
template <int N>
__device__ __forceinline__ void fence_operand(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N>
__device__ __forceinline__ void fence_operand(uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Declares registers free: the next wgmma overwrites them. Without it the values that they hold
// count as needed until then, and ptxas may give the asynchronous pipeline up (C7511).
template <int N>
__device__ __forceinline__ void mark_undefined(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(r[i])::"memory");
}

// Computes x, which is never the NaN of these bits, before anything that follows. ptxas may move
// arithmetic across a wgmma wait, and does: without this the softmax that should run under a
// product runs after it.
__device__ __forceinline__ void order_before(float x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x7fedcba9;\n@p trap;\n}" ::"r"(__float_as_uint(x))
      : "memory");
}

// A number of which the compiler knows nothing: what follows from it is computed where it is
// needed, and not ahead of a loop that has no registers for it.
__device__ __forceinline__ int hide_from_optimizer(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Moves registers between the warpgroups of a block; every warp of a warpgroup must call it. PTX
// ISA 9.7.19.5, setmaxnreg.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- where a thread stands in its block ----

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
