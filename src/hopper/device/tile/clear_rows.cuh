// SPDX-License-Identifier: Apache-2.0
// Keys that no query of the sequence sees, in front of a window or of a chunk, share a tile with
// keys that are seen. Their weight is 0, but 0 · NaN and 0 · ∞ are NaN: their rows are cleared
// before a product sums over them, so that what they hold reaches nobody. Rows behind the end of a
// sequence come as zeros from TMA.
#pragma once

#include "hopper/device/barriers.cuh"
#include "hopper/device/tile_schedule.hpp"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

// Zeroes the first rows of a tile that TMA has written, for the tensor cores, or for these threads
// alone, to read. Where several groups of threads read a tile each clears it for itself.
template <class Tile>
__device__ __forceinline__ void clear_rows(uint8_t* tile, int rows, int thread, int threads,
                                           int barrier) {
  const int bytes = min(rows, Tile::kRows) * Tile::kRowBytes;
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
#pragma unroll 1
    for (int at = thread * 16; at < bytes; at += threads * 16)
      *reinterpret_cast<uint4*>(tile + chunk * Tile::kChunkBytes + at) = {};
  fence_shared_for_async_proxy();
  sync(NamedBarrier::kRowsCleared, barrier, threads);
}

}  // namespace flash3::hopper
