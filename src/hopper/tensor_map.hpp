// Describing a tensor to the copy engine.
#pragma once

#include "core/problem.hpp"
#include "hopper/device/head_pack.hpp"
#include "hopper/device/tensor_map.h"

namespace flash3::hopper {

// Whether TMA can address the view: 16-byte aligned base, strides that are multiples of 16 bytes
// and below 2^40; the step from one group of packed heads to the next is one of them.
bool tma_can_address(const TensorView& view, const HeadPack& pack = {});

// Columns of a TMA box: the width of the swizzle that SharedTile takes for this head_dim.
constexpr int box_columns(int head_dim) { return head_dim % 64 == 0 ? 64 : 32; }

// Maps of a 16-bit tensor. box_dims is the swizzle's width: 32 or 64 elements. What lies outside of
// the view reads as zero.

// K, V: dimensions (dim, seq, head, batch), boxes of box_rows × box_dims elements of one head.
Status encode_key_map(const TensorView& view, int box_rows, int box_dims, TensorMap* map);

// Q, out: dimensions (dim, head in the group, seq, head group, batch), boxes of one warpgroup's
// rows (HeadPack) × box_dims elements. pack.heads must divide the heads.
Status encode_query_map(const TensorView& view, const HeadPack& pack, int box_dims, TensorMap* map);

}  // namespace flash3::hopper
