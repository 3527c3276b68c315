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

}  // namespace flash3::hopper
