// The work of one launch, cut into tiles, and the order in which blocks take them. Integers only,
// host and device: a kernel family's params hold a TileSchedule, and scheduler.cuh hands its tiles
// out.
//
// A head group is the query heads that share work tiles: one, or the packed ones (head_pack.hpp).
// Tiles are ordered so that blocks that run at the same time read the same K and V from the L2
// cache: a few head groups at a time (groups_at_a_time), and within those
//   full   all query tiles of one group after the other
//   band   the query tile last in the sequence first (under a causal mask the longest), one of each
//          group in turn
#pragma once

#include "core/band.hpp"

namespace flash3::hopper {

// See TileCounter in scheduler.cuh.
struct TileCounterMemory {
  unsigned long long ticket;
  int next;
  int finished_blocks;
};

struct TileSchedule {
  Band band;  // cut to where no sum with a row overflows 32 bits
  int seq_q, seq_k;
  int tile_queries;            // queries of a work tile
  int m_tiles;                 // per head group
  int head_groups;             // per batch element
  int groups;                  // batch · head_groups
  int groups_at_a_time;        // consecutive ones whose K and V share the L2 cache
  int tiles;                   // in all
  TileCounterMemory* counter;  // null: tiles are dealt out in turn
  unsigned long long ticket;   // of this launch
};

struct WorkTile {
  int query;  // the first one
  int head_group, batch;
  int key_tile_begin, key_tile_end;  // key tiles that the mask leaves, half-open; equal if none
  bool valid;                        // false: no more work

  FLASH3_HOST_DEVICE constexpr bool has_keys() const { return key_tile_begin < key_tile_end; }
};

// The index-th tile in the order above, for a kernel with key tiles of tile_n and a band or none.
FLASH3_HOST_DEVICE constexpr WorkTile decode_tile(const TileSchedule& schedule, int tile_n,
                                                  bool band, int index) {
  WorkTile work{};
  work.valid = index < schedule.tiles;
  if (!work.valid) return work;

  const int m_tiles = schedule.m_tiles, at_a_time = schedule.groups_at_a_time;
  const int first_group = index / (at_a_time * m_tiles) * at_a_time;
  const int groups_left = schedule.groups - first_group;
  const int groups = at_a_time < groups_left ? at_a_time : groups_left;
  const int place = index - first_group * m_tiles;  // among the tiles of these groups
  const int m_tile = band ? m_tiles - 1 - place / groups : place % m_tiles;
  const int group = first_group + (band ? place % groups : place / m_tiles);

  work.query = m_tile * schedule.tile_queries;
  work.batch = group / schedule.head_groups;
  work.head_group = group % schedule.head_groups;
  work.key_tile_end = (schedule.seq_k + tile_n - 1) / tile_n;
  if (band) {
    const int end = work.query + schedule.tile_queries;
    const Range queries = {work.query, end < schedule.seq_q ? end : schedule.seq_q};
    const Range keys = schedule.band.key_tiles(queries, schedule.seq_k, tile_n);
    work.key_tile_begin = int(keys.begin);
    work.key_tile_end = int(keys.end);
  }
  return work;
}

}  // namespace flash3::hopper
