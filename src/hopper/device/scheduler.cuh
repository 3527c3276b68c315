// Which tile of work a block does next. The grid is persistent: block b does the tiles b, b + grid,
// b + 2·grid, …
//
// Tiles are ordered so that blocks that run at the same time read the same K and V from the L2
// cache: a few heads at a time (heads_in_group), and within such a group
//   full   all query tiles of one head after the other;
//   band   the query tile last in the sequence first (under a causal mask the longest), one of each
//   head in turn, and every
//          other round of the grid backwards: so each block gets its share of long and short tiles.
// Roles of a block walk the same list on their own; nothing is exchanged.
#pragma once

#include "core/band.hpp"
#include "hopper/forward/params.h"

namespace flash3::hopper {

struct WorkTile {
  int query;  // first row
  int head, batch;
  int key_tile_begin, key_tile_end;  // key tiles that the mask leaves, half-open; equal if none

  __device__ __forceinline__ bool has_keys() const { return key_tile_begin < key_tile_end; }
};

template <int kTileM, int kTileN, bool kBand>
struct TileScheduler {
  const ForwardParams& params;

  // The round-th tile of this block; false if there is none.
  __device__ __forceinline__ bool tile(int round, WorkTile& work) const {
    const int position = kBand && round % 2 == 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const long long index = (long long)round * gridDim.x + position;
    if (index >= params.tiles) return false;

    const int group = int(index) / (params.heads_in_group * params.m_tiles);
    const int first_head = group * params.heads_in_group;
    const int heads = min(params.heads_in_group, params.batch_heads - first_head);
    const int in_group = int(index) - first_head * params.m_tiles;
    int m_tile, batch_head;
    if constexpr (kBand) {
      m_tile = params.m_tiles - 1 - in_group / heads;
      batch_head = first_head + in_group % heads;
    } else {
      m_tile = in_group % params.m_tiles;
      batch_head = first_head + in_group / params.m_tiles;
    }

    work.query = m_tile * kTileM;
    work.batch = batch_head / params.heads_q;
    work.head = batch_head % params.heads_q;
    if constexpr (kBand) {
      const Range rows = {work.query, min(work.query + kTileM, params.seq_q)};
      const Range keys = params.band.key_tiles(rows, params.seq_k, kTileN);
      work.key_tile_begin = int(keys.begin);
      work.key_tile_end = int(keys.end);
    } else {
      work.key_tile_begin = 0;
      work.key_tile_end = (params.seq_k + kTileN - 1) / kTileN;
    }
    return true;
  }
};

}  // namespace flash3::hopper
