// The asynchronous warpgroup MMA: ordering instructions and the shared-memory matrix descriptor.
// libcu++ has none of it.
#pragma once

#include "core/host_device.hpp"
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

// How rows of a shared-memory tile are swizzled: TMA writes and wgmma reads with the same pattern.
// PTX ISA 9.7.15.5.1.
enum class Swizzle : int { k64B = 2, k128B = 1 };  // values: layout_type of the descriptor

FLASH3_HOST_DEVICE constexpr int swizzle_bytes(Swizzle s) { return s == Swizzle::k128B ? 128 : 64; }

// Matrix descriptor without its address. All offsets in bytes. PTX ISA 9.7.15.5.1.2,
// matrix-descriptor format.
FLASH3_HOST_DEVICE constexpr uint64_t descriptor_layout(Swizzle swizzle, int leading_offset,
                                                        int stride_offset) {
  return (uint64_t(leading_offset >> 4) << 16) | (uint64_t(stride_offset >> 4) << 32) |
         (uint64_t(swizzle) << 62);
}

// Adds the address, a 32-bit offset into shared memory.
__device__ __forceinline__ uint64_t descriptor(uint64_t layout, uint32_t address) {
  return layout | ((address & 0x3FFFF) >> 4);
}

}  // namespace flash3::hopper
