// SPDX-License-Identifier: Apache-2.0
// Whose a query tile of the workspace is: for the small kernels, which work tile by tile.
#pragma once

#include "hopper/backward/params.h"
#include "hopper/varlen/find_sequence.cuh"

namespace flash3::hopper {

struct RowTile {
  int batch, head;
  int query;     // the first one, of the sequence
  SeqRows rows;  // of the sequence; none if the tile is nobody's
};

// The index-th of all tiles. By a whole block.
__device__ __forceinline__ RowTile find_tile(const BackwardRows& rows, int index) {
  const QueryTiles& tiles = rows.tiles;
  const int place = index / tiles.tiles, tile = index - place * tiles.tiles;
  if (!tiles.packed) {
    const int batch = place / tiles.heads_q;
    return {batch, place - batch * tiles.heads_q, tile * tiles.tile_m,
            rows_of(rows.sequences, batch)};
  }
  const auto first_tile = [&](int batch) {
    return tiles.first(batch, int(rows_of(rows.sequences, batch).first));
  };
  __shared__ int sequence;
  if (threadIdx.x < 32) {
    const int found = last_place_from(rows.batch, tile, first_tile);
    if (threadIdx.x == 0) sequence = found;
  }
  __syncthreads();
  const int batch = sequence;
  const RowTile found{batch, place, (tile - first_tile(batch)) * tiles.tile_m,
                      rows_of(rows.sequences, batch)};
  // Between sequences, or cu_seqlens are not what they must be.
  if (found.query < 0 || found.query >= found.rows.capacity) return {batch, place, 0, {}};
  return found;
}

}  // namespace flash3::hopper
