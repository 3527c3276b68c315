// Describing a tensor to the copy engine.
#pragma once

#include "core/problem.hpp"
#include "hopper/device/tensor_map.h"

namespace flash3::hopper {

// Whether TMA can address the view: 16-byte aligned base, strides that are multiples of 16 bytes
// and below 2^40.
bool tma_can_address(const TensorView& view);

// The map of boxes of box_rows × box_dims elements of a 16-bit tensor; box_dims is the swizzle's
// width: 32 or 64 elements. What lies outside of the view reads as zero.
Status encode_tensor_map(const TensorView& view, int box_rows, int box_dims, TensorMap* map);

}  // namespace flash3::hopper
