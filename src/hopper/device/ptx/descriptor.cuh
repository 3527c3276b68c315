// SPDX-License-Identifier: Apache-2.0
// How wgmma finds a matrix in shared memory. PTX ISA 9.7.15.5.1, shared memory layout and matrix
// descriptor.
#pragma once

#include "core/host_device.hpp"
#include "hopper/device/ptx/integers.cuh"

namespace flash3::hopper {

// How rows of a shared-memory tile are swizzled: TMA writes and wgmma reads with the same pattern.
enum class Swizzle : int { k64B = 2, k128B = 1 };  // values: layout_type of the descriptor

FLASH3_HOST_DEVICE constexpr int swizzle_bytes(Swizzle s) { return s == Swizzle::k128B ? 128 : 64; }

// The 64-bit descriptor in halves: only the low one holds the address, so that stepping through a
// tile is one 32-bit addition and the high half stays a constant.
struct Descriptor {
  uint32_t low;
  uint32_t high;

  // The same matrix, `bytes` further (a multiple of 16).
  FLASH3_HOST_DEVICE constexpr Descriptor operator+(int bytes) const {
    return {low + uint32_t(bytes >> 4), high};
  }
};

// A descriptor of address 0. Offsets in bytes.
FLASH3_HOST_DEVICE constexpr Descriptor descriptor_layout(Swizzle swizzle, int leading_offset,
                                                          int stride_offset) {
  return {uint32_t(leading_offset >> 4) << 16, uint32_t(stride_offset >> 4) | uint32_t(swizzle)
                                                                                  << 30};
}

}  // namespace flash3::hopper
