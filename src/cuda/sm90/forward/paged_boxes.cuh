// SPDX-License-Identifier: Apache-2.0
// FP8 keys in pages, or in an element of a sequence's own: the boxes in which a warp loads them,
// and their scales.
#pragma once

#include "cuda/sm90/forward/key_pages.hpp"
#include "cuda/sm90/forward/load_fp8.cuh"

namespace flash3::cuda::sm90 {

// One lane's boxes of key tiles of kRows rows. kMayLackTable: as KeyPages has it.
template <int kRows, bool kMayLackTable = false>
struct PagedBoxes {
  const ForwardParams& params;
  int at_row;  // of a tile; after its last: the lane has no box

  __device__ __forceinline__ explicit PagedBoxes(const ForwardParams& p)
      : params(p), at_row(int(threadIdx.x % 32) * kernel_params(p).pages.box_rows) {}

  __device__ __forceinline__ bool leads() const { return at_row == 0; }
  __device__ __forceinline__ bool has_box() const { return at_row < kRows; }

  // Where the lane's box of key tile n lies; nowhere if the work tile does not have it.
  __device__ __forceinline__ PagePlace find(const WorkTile& work, int n) const {
    if (n < work.key_tile_begin || n >= work.key_tile_end || !has_box()) return {};
    return place_of_key<kMayLackTable>(kernel_params(params).pages, work.sequence,
                                       n * kRows + at_row);
  }

  // Loads the box if it lies in the part of the key tile that begins at first_row: a Tile.
  template <class Tile>
  __device__ __forceinline__ void load(uint8_t* stage, const TensorMap* map, const RowMap& rows,
                                       const WorkTile& work, int n, int first_row,
                                       const PagePlace& place, uint64_t* full) const {
    const int row = at_row - first_row;
    if (row < 0 || row >= Tile::kRows) return;
    const int left = rows_left(kernel_params(params).pages, work.sequence, n * kRows + at_row);
    const BoxAt at{0, work.head_group / params.groups_per_kv_head, kRaggedEnd - left,
                   rows.rows_per_batch * place.element + place.row + left, true};
    load_box<Tile>(stage + row * Tile::kRowBytes, map, at, full);
  }
};

// Starts to copy the scale of a key tile, of K or V. Those of blocks lie with the rows of an
// element; a key tile lies in one block, for the host sees to it.
__device__ __forceinline__ void copy_paged_scale(float* shared, const ScaleView& view, int batch,
                                                 int head, const PagePlace& tile) {
  const bool by_rows = view.kind == ScaleKind::kBlock;
  RowScales scale{view.data};
  if (scale.first)
    scale.first += (by_rows ? tile.element : batch) * view.stride_batch + head * view.stride_head +
                   tile.row / int(kScaleBlock) * view.stride_block;
  copy_scale(shared, scale, 0);
}

// Those of K and V.
__device__ __forceinline__ void copy_paged_scales(KeyTileScales& scales,
                                                  const ForwardParams& params, const WorkTile& work,
                                                  const PagePlace& tile) {
  const int batch = work.sequence.batch, head = work.head_group / params.groups_per_kv_head;
  copy_paged_scale(&scales.k, fp8_params(params).k_scale, batch, head, tile);
  copy_paged_scale(&scales.v, fp8_params(params).v_scale, batch, head, tile);
}

}  // namespace flash3::cuda::sm90
