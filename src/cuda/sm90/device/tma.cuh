// SPDX-License-Identifier: Apache-2.0
// Bulk tensor copies between global and shared memory by the copy engine. One thread issues; what
// lies outside the tensor is read as zero and never written.
#pragma once

#include "cuda/device/ptx/bulk_copy.cuh"
#include "cuda/device/views.h"
#include "cuda/sm90/device/barriers.cuh"

namespace flash3::cuda::sm90 {

// Where a box begins in a map (RowMap): (dim, head, row, batch), or of a ragged map (dim,
// head, y, x).
struct BoxAt {
  int32_t dim, head, y, x;
  bool ragged;
};

// The rows from `row` on, of a head or of a group's first head, of a sequence. Rows behind the
// sequence's end are read as zero and never written. In a map of one length the tensor ends there.
// A ragged map has all rows of the tensor twice, as x and as y, and y ends at kRaggedEnd: the box
// begins so far before it as the sequence has rows left, and x makes up for it. A last coordinate
// takes kRaggedEnd rows off again: its stride wraps the address round.
__device__ __forceinline__ BoxAt box_at(const RowMap& map, int batch, int first, int length,
                                        int row, int head) {
  if (!map.ragged) return {0, head, row, batch, false};
  return {0, head, kRaggedEnd - max(length - row, 0), batch * map.rows_per_batch + first + length,
          true};
}

__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, const BoxAt& at,
                                         uint64_t* barrier) {
  if (at.ragged) {
    copy_box_in(shared, map, {at.dim, at.head, at.y, at.x, kRaggedEnd}, barrier);
  } else {
    copy_box_in(shared, map, {at.dim, at.head, at.y, at.x}, barrier);
  }
}

// The same of a map by sequence, for what is read once.
__device__ __forceinline__ void tma_load_once(void* shared, const TensorMap* map, const BoxAt& at,
                                              uint64_t* barrier) {
  copy_box_in_once(shared, map, {at.dim, at.head, at.y, at.x}, barrier);
}

// Loads a box of rows of a SharedTile, chunk by chunk; `shared`: the tile's first such row.
template <class Tile>
__device__ __forceinline__ void load_box(uint8_t* shared, const TensorMap* map, BoxAt at,
                                         uint64_t* full) {
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
    at.dim = c * Tile::kChunk;
    tma_load(shared + c * Tile::kChunkBytes, map, at, full);
  }
}

__device__ __forceinline__ void tma_store(const TensorMap* map, const BoxAt& at,
                                          const void* shared) {
  if (at.ragged) {
    copy_box_out(map, {at.dim, at.head, at.y, at.x, kRaggedEnd}, shared);
  } else {
    copy_box_out(map, {at.dim, at.head, at.y, at.x}, shared);
  }
}

// ---- hidden keys ----

// Keys that no query of the sequence sees, in front of a window or of a chunk, share a tile with
// keys that are seen. Their weight is 0, but 0 · NaN and 0 · ∞ are NaN: the producer clears their
// rows before the consumers may read the tile, so that what they hold reaches nobody. Rows behind
// the end of a sequence come as zeros from TMA.

// Zeroes the first rows of a tile that TMA has written, by one thread, and makes that visible to
// the tensor cores of whoever waits for this thread.
template <class Tile>
__device__ __forceinline__ void clear_rows(uint8_t* tile, int rows) {
  const int bytes = min(rows, Tile::kRows) * Tile::kRowBytes;
  // One loop: two make ptxas schedule the consumers of the same kernel worse.
#pragma unroll 1
  for (int at = 0; at < bytes; at += 16)
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
      *reinterpret_cast<uint4*>(tile + chunk * Tile::kChunkBytes + at) = {};
  fence_shared_for_async_proxy();
}

// Clears the first `hidden` rows of a tile whose load completes `loaded`, a barrier for this alone
// in this phase; then the tile counts as full.
template <class Tile>
__device__ __forceinline__ void clear_when_loaded(uint8_t* tile, int hidden, uint64_t* loaded,
                                                  uint32_t phase, uint64_t* full) {
  wait(loaded, phase, "tile_loaded");
  clear_rows<Tile>(tile, hidden);
  arrive(full);
}

}  // namespace flash3::cuda::sm90
