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
// the tensor cores of who waits for this thread.
template <class Tile>
__device__ __forceinline__ void clear_rows(uint8_t* tile, int rows) {
  const int bytes = min(rows, Tile::kRows) * Tile::kRowBytes;
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk, tile += Tile::kChunkBytes)
#pragma unroll 1
    for (int at = 0; at < bytes; at += 16) *reinterpret_cast<uint4*>(tile + at) = {};
  fence_shared_for_async_proxy();
}

// Loads a tile by load(barrier), of which the first `hidden` rows are cleared before it counts as
// full. `loaded` is a barrier for this alone, in phase `loaded_phase`.
template <class Tile, class Load>
__device__ __forceinline__ void load_cleared(const Load& load, uint8_t* tile, int hidden,
                                             uint64_t* full, uint64_t* loaded,
                                             uint32_t loaded_phase) {
  load(loaded);
  wait(loaded, loaded_phase, BarrierName::kTileLoaded);
  clear_rows<Tile>(tile, hidden);
  arrive(full);
}

}  // namespace flash3::hopper
