// SPDX-License-Identifier: Apache-2.0
// Maps a query tile of the workspace to its sequence and head, for the small kernels.
#pragma once

#include "cuda/sm90/backward/params.h"
#include "cuda/varlen/find_sequence.cuh"

namespace flash3::cuda::sm90 {

struct SequenceTile {
  int batch, head;
  int query;      // the tile's first one, counted in the sequence
  RowRange rows;  // the sequence's; none for a tile that belongs to no sequence
};

// Finds the index-th of all tiles. A whole block calls this.
__device__ __forceinline__ SequenceTile find_tile(const BackwardWorkspace& workspace, int index) {
  const QueryTiles& tiles = workspace.tiles;
  const int place = index / tiles.tiles, tile = index - place * tiles.tiles;
  if (!tiles.packed) {
    const int batch = place / tiles.heads_q;
    return {batch, place - batch * tiles.heads_q, tile * tiles.tile_m,
            rows_of(workspace.sequences, batch)};
  }
  const auto first_tile = [&](int batch) {
    return tiles.first(batch, int(rows_of(workspace.sequences, batch).first));
  };
  __shared__ int sequence;
  if (threadIdx.x < 32) {
    const int found = last_place_from(workspace.batch, tile, first_tile);
    if (threadIdx.x == 0) sequence = found;
  }
  __syncthreads();
  const int batch = sequence;
  const SequenceTile found{batch, place, (tile - first_tile(batch)) * tiles.tile_m,
                           rows_of(workspace.sequences, batch)};
  // The tile lies between sequences, or cu_seqlens decrease.
  if (found.query < 0 || found.query >= found.rows.capacity) return {batch, place, 0, {}};
  return found;
}

}  // namespace flash3::cuda::sm90
