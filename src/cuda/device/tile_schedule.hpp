// SPDX-License-Identifier: Apache-2.0
// The work of one launch, cut into tiles, and the order in which blocks take them. Integers only,
// host and device: a kernel family's params hold a TileSchedule, and scheduler.cuh hands its tiles
// out.
//
// A head group is the query heads that share work tiles: one, or the packed ones (HeadPack).
// Tiles are ordered so that blocks that run at the same time read the same K and V from the L2
// cache: a few head groups at a time (groups_at_a_time), and within those
//   full   all query tiles of one group after the other
//   band   the last query tile of every group (under a causal mask the longest), then the last but
//          one of every group, and so on
// A ragged batch goes sequence by sequence, the longest first (SequenceList), each in that order.
// Short ragged sequences share tiles: each has slot_rows rows of its own of one long sequence,
// whose mask is chunks of so many.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda {

// Packed heads: which query and which head a row of a tile is. Several query heads of one KV head
// can share a tile (GQA), so that a short sequence still fills it and K and V are read once for all
// of them.
//
// The 64 rows of a warpgroup are `heads` heads of `queries` queries:
//
//   row r  is  query r / heads, head r % heads    (both counted from the warpgroup's first)
//
// What remains where heads does not divide 64 is left idle. One head: row r is query r.
struct HeadPack {
  static constexpr int kRows = 64;

  int heads = 1;
  int queries = kRows;
  int reciprocal = 1 << 16;  // r / heads = r · reciprocal >> 16

  // 1 ≤ heads ≤ kRows.
  static constexpr HeadPack of(int heads) {
    return {heads, kRows / heads, ceil_div(1 << 16, heads)};
  }

  FLASH3_HOST_DEVICE constexpr int rows() const { return heads * queries; }
  FLASH3_HOST_DEVICE constexpr int query_of(int row) const { return row * reciprocal >> 16; }
  FLASH3_HOST_DEVICE constexpr int head_of(int row) const { return row - query_of(row) * heads; }
};

// See TileCounter in scheduler.cuh.
struct TileCounterMemory {
  unsigned long long ticket;
  int next;
  int finished_blocks;
};

struct TileSchedule {
  TileMask mask;         // of all sequences, or of the long one whose slots they are
  TileMaskRule rule;     // of each sequence of a ragged batch
  int seq_q, seq_k;      // of sequences of one length, or of the long one
  int tile_queries;      // of a work tile
  int m_tiles;           // per head group
  int head_groups;       // per batch element
  int groups;            // batch · head_groups
  int groups_at_a_time;  // consecutive ones whose K and V share the L2 cache
  int tiles;             // in all; of a ragged batch the list's
  SequenceList sequences;
  int slot_rows;               // of a short sequence, a power of two; 0: they share no tiles
  TileCounterMemory* counter;  // null: block b has tiles b, b + grid, …
  unsigned long long ticket;   // of this launch
  bool may_hide_keys;          // before the first query's window or chunk
};

// Short sequences whose rows are one work tile's.
inline constexpr int kMaxSlots = 16;

struct WorkTile {
  int query;  // the first one
  int head_group;
  int key_tile_begin, key_tile_end;  // key tiles that the mask leaves, half-open; equal if none
  bool valid;                        // false: no more work
  ListedSequence sequence;           // of slots: the long one
  TileMask mask;                     // the sequence's

  FLASH3_HOST_DEVICE constexpr bool has_keys() const { return key_tile_begin < key_tile_end; }

  // How many of the first key tile's keys no query of the sequence sees: they lie before the
  // first query's window or chunk. At most 0 if none.
  FLASH3_HOST_DEVICE constexpr int hidden_keys(int tile_n) const {
    return mask.firsts({0, sequence.q_length}).least - key_tile_begin * tile_n;
  }
};

// Tile m_tile of a head group of a sequence, for a kernel with key tiles of tile_n and a band or
// none.
FLASH3_HOST_DEVICE constexpr WorkTile work_tile(const ListedSequence& sequence,
                                                const TileMask& mask, int tile_queries, int m_tile,
                                                int head_group, int tile_n, bool band) {
  WorkTile work{};
  work.valid = true;
  work.query = m_tile * tile_queries;
  work.head_group = head_group;
  work.key_tile_end = ceil_div(sequence.k_length, tile_n);
  work.sequence = sequence;
  work.mask = mask;
  if (band) {
    const int end = work.query + tile_queries;
    const TileMask::Range queries = {work.query, end < sequence.q_length ? end : sequence.q_length};
    const TileMask::Range keys = mask.key_tiles(queries, sequence.k_length, tile_n);
    work.key_tile_begin = keys.begin;
    work.key_tile_end = keys.end;
  }
  return work;
}

// A tile of m_tiles · groups ones, in the order above.
struct TilePlace {
  int m_tile, group;
};
FLASH3_HOST_DEVICE constexpr TilePlace tile_place(int m_tiles, int groups, int at_a_time, bool band,
                                                  int index) {
  const int first_group = index / (at_a_time * m_tiles) * at_a_time;
  const int groups_left = groups - first_group;
  const int together = at_a_time < groups_left ? at_a_time : groups_left;
  const int place = index - first_group * m_tiles;  // among the tiles of these groups
  return {band ? m_tiles - 1 - place / together : place % m_tiles,
          first_group + (band ? place % together : place / m_tiles)};
}

// The index-th tile of sequences of one length.
FLASH3_HOST_DEVICE constexpr WorkTile work_tile_at(const TileSchedule& schedule, int tile_n,
                                                   bool band, int index) {
  if (index >= schedule.tiles) return {};
  const TilePlace at =
      tile_place(schedule.m_tiles, schedule.groups, schedule.groups_at_a_time, band, index);
  ListedSequence sequence{};
  sequence.batch = at.group / schedule.head_groups;
  sequence.q_length = schedule.seq_q;
  sequence.k_length = schedule.seq_k;
  return work_tile(sequence, schedule.mask, schedule.tile_queries, at.m_tile,
                   at.group % schedule.head_groups, tile_n, band);
}

// The index-th tile of a listed sequence.
FLASH3_HOST_DEVICE constexpr WorkTile work_tile_at(const TileSchedule& schedule,
                                                   const ListedSequence& sequence, int tile_n,
                                                   bool band, int index) {
  const TilePlace at =
      tile_place(sequence.tiles, schedule.head_groups, sequence.groups_at_a_time, band, index);
  const auto mask = TileMask::make(sequence.q_length, sequence.k_length, schedule.rule);
  return work_tile(sequence, mask, schedule.tile_queries, at.m_tile, at.group, tile_n, band);
}

}  // namespace flash3::cuda
