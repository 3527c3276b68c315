// SPDX-License-Identifier: Apache-2.0
// Describing a tensor to the copy engine.
#pragma once

#include "core/problem.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

// A problem's tensor as it lies in memory: the rows of a packed one are a single batch element.
TensorView tensor_rows(const TensorView& view, const Sequences& sequences);

// How the kernels count the rows of such a tensor.
enum class RowIndexing { kBySequence, kRagged };

// Whether TMA can address the tensor: 16-byte aligned base, strides that are multiples of 16 bytes
// and below 2^40; ragged: all rows evenly spread, too.
bool tma_can_address(const TensorView& view, RowIndexing rows = RowIndexing::kBySequence,
                     int element_bytes = 2);

// Rows of a key tile that lie side by side in a cache, whatever the lengths, and that TMA can load
// at once: in boxes of so many a tile never crosses the end of a page. 0: too few.
int cache_box_rows(const KvCache& cache, int tile_n);

// The view to make a map of: the tensor's own or, if it has no element, one of no rows at
// `address`, which is any memory of the device that TMA can address: nothing is read from it. A
// kernel may load through every map that it is launched with: short sequences, say, share tiles
// that are loaded whatever the lengths.
TensorView mappable(const TensorView& view, void* address);

// Columns of a TMA box: the width of the swizzle that SharedTile takes for this head_dim.
constexpr int box_columns(int head_dim, int element_bytes = 2) {
  return (head_dim * element_bytes % 128 == 0 ? 128 : 64) / element_bytes;
}

// dims is the swizzle's width: box_columns(). What lies outside of the view reads as zero.
// Boxes of box_rows rows of box_heads heads each, box_dims columns; in shared memory the heads of a
// row lie side by side. Dimensions (dim, head, row, batch), or ragged (dim, head, y, x, wrap): see
// box_at() in device/tile.cuh.
struct Box {
  int rows, dims;
  int heads = 1;
  int element_bytes = 2;
  int l2_bytes = 256;  // that L2 brings at once: 128 or 256
};
Status encode_map(const TensorView& view, RowIndexing rows, const Box& box, TensorMap* map,
                  RowMap* row_map);

}  // namespace flash3::cuda::sm90
