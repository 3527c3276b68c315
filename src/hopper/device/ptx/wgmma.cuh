// SPDX-License-Identifier: Apache-2.0
// The asynchronous warpgroup MMA: ordering instructions and the shared-memory matrix descriptor.
// libcu++ has none of it.
#pragma once

#include "hopper/device/ptx/wgmma_shapes.cuh"

namespace flash3::hopper {

// Orders register accesses before the next wgmma. PTX ISA 9.7.15.7.1, wgmma.fence.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of wgmmas. PTX ISA 9.7.15.7.2, wgmma.commit_group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups are in flight. PTX ISA 9.7.15.7.3, wgmma.wait_group.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler knows nothing of registers that a wgmma in flight still writes or reads. This pins
// their last use before, or their first use after, the place where it stands.
template <int N>
__device__ __forceinline__ void pin_registers(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin_registers(uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Declares registers free: the next wgmma overwrites them. Without it the values that they hold
// count as needed until then, and ptxas may give the asynchronous pipeline up (C7511).
template <int N>
__device__ __forceinline__ void discard_registers(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(r[i])::"memory");
}

// Holds back what follows until x, which is never negative, has been computed. ptxas may move
// arithmetic across a wgmma wait, and does: without this the softmax that should run under a
// product runs after it.
__device__ __forceinline__ void finish_first(float x) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p trap;\n}" ::"f"(x) : "memory");
}

}  // namespace flash3::hopper
