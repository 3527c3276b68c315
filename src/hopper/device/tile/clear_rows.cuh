// SPDX-License-Identifier: Apache-2.0
// Keys that no query of the sequence sees, in front of a window or of a chunk, share a tile with
// keys that are seen. Their weight is 0, but 0 · NaN and 0 · ∞ are NaN: the producer clears their
// rows before the consumers may read the tile, so that what they hold reaches nobody. Rows behind
// the end of a sequence come as zeros from TMA.
#pragma once

#include "hopper/device/barriers.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

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

}  // namespace flash3::hopper
