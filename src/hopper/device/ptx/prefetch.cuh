// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.9.15, prefetch.
#pragma once

#include "hopper/device/tensor_map.h"

namespace flash3::hopper {

// Brings a tensor map into the cache of the copy engine.
__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flash3::hopper
