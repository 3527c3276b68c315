// SPDX-License-Identifier: Apache-2.0
// The work of the main kernel: a block has a tile of keys of one KV head of a sequence, and walks
// over the query tiles that see it. Integers only, host and device.
#pragma once

#include "core/arithmetic.hpp"
#include "hopper/device/tile_schedule.hpp"

namespace flash3::hopper {

// Where query tiles lie in the workspace: [batch, heads_q, tiles]. Packed sequences are one behind
// the other, [heads_q, tiles], and each begins at a tile of its own: b tiles later than the rows
// before it fill, so that none needs to know the others' lengths.
struct QueryTiles {
  bool packed;
  int heads_q;
  int tile_m;
  int tiles;  // of each head

  // A sequence's first one, of the first head; the next head's is `tiles` further. q_first: the
  // sequence's first row in a packed tensor.
  FLASH3_HOST_DEVICE constexpr int first(int batch, int q_first) const {
    return packed ? q_first / tile_m + batch : batch * heads_q * tiles;
  }
};

struct KeySchedule {
  TileMaskRule rule;
  QueryTiles query_tiles;
  int heads_k;
  // Deterministic: blocks add to the sums of dQ in turn. They take their index by a ticket then, so
  // that they begin in order, and a block only ever waits for ones that have begun.
  bool in_turn;
  // All sequences of one length: the first one, which has the tiles of all their kv_heads = batch ·
  // heads_k heads. Otherwise they are listed, with tiles of keys.
  SequenceRows one_length;
  int kv_heads;
  SequenceList sequences;
};

// The work of one block.
struct KeyTile {
  bool valid;  // false: there are fewer tiles than blocks
  int key;     // the first one
  int kv_head;
  int query_tile_begin, query_tile_end;  // query tiles that the mask leaves, half-open
  int first_query_tile;                  // of the sequence: QueryTiles
  SequenceRows sequence;
  TileMask queries;  // that see a key: the mask, transposed

  FLASH3_HOST_DEVICE constexpr int query_tiles() const {
    return query_tile_end > query_tile_begin ? query_tile_end - query_tile_begin : 0;
  }
  FLASH3_HOST_DEVICE constexpr int next(int query_tile) const {
    return query_tile + 1 == query_tile_end ? query_tile_begin : query_tile + 1;
  }

  // How many of its keys no query of the sequence sees: they lie in front of the first query's
  // window or chunk. At most 0 if none.
  FLASH3_HOST_DEVICE constexpr int hidden_keys() const {
    return queries.transposed().first(0) - key;
  }
};

// Tile n of a KV head of a sequence.
FLASH3_HOST_DEVICE constexpr KeyTile key_tile(const KeySchedule& schedule,
                                              const SequenceRows& sequence, int n, int kv_head,
                                              int tile_n, bool band) {
  const int tile_m = schedule.query_tiles.tile_m;
  KeyTile work{};
  work.valid = true;
  work.key = n * tile_n;
  work.kv_head = kv_head;
  work.first_query_tile = schedule.query_tiles.first(sequence.batch, sequence.q_first);
  work.sequence = sequence;
  work.queries = TileMask::make(sequence.q_length, sequence.k_length, schedule.rule).transposed();
  const int end = work.key + tile_n;
  const TileMask::Range keys = {work.key, end < sequence.k_length ? end : sequence.k_length};
  if (keys.empty()) return work;  // unused ones, whose gradients are zeros to write
  work.query_tile_end = ceil_div(sequence.q_length, tile_m);
  if (band) {
    const TileMask::Range tiles = work.queries.key_tiles(keys, sequence.q_length, tile_m);
    work.query_tile_begin = tiles.begin;
    work.query_tile_end = tiles.end;
  }
  return work;
}

// The index-th tile of n_tiles · heads ones. A few KV heads at a time, and within those
//   full   all key tiles of one head after the other
//   band   the first key tile of each head in turn, then the second: under a causal mask the
//          longest come first
// In turn: one key tile of each head in turn, from the first, or under a band from the last.
struct KeyTilePlace {
  int n, head;
};
FLASH3_HOST_DEVICE constexpr KeyTilePlace key_tile_place(int n_tiles, int heads, int at_a_time,
                                                         bool band, bool in_turn, int index) {
  const int first_head = index / (at_a_time * n_tiles) * at_a_time;
  const int heads_left = heads - first_head;
  const int together = at_a_time < heads_left ? at_a_time : heads_left;
  const int place = index - first_head * n_tiles;
  if (!band && !in_turn) return {place % n_tiles, first_head + place / n_tiles};
  const int n = place / together;
  return {band && in_turn ? n_tiles - 1 - n : n, first_head + place % together};
}

// The index-th tile of a listed sequence, whose heads are heads_k, or of all if they have one
// length; not valid if there are fewer.
FLASH3_HOST_DEVICE constexpr KeyTile decode_key_tile(const KeySchedule& schedule,
                                                     SequenceRows sequence, int heads, int tile_n,
                                                     bool band, int index) {
  if (index < 0 || index >= sequence.tiles * heads) return {};
  const KeyTilePlace at = key_tile_place(sequence.tiles, heads, sequence.groups_at_a_time, band,
                                         schedule.in_turn, index);
  sequence.batch += at.head / schedule.heads_k;
  return key_tile(schedule, sequence, at.n, at.head % schedule.heads_k, tile_n, band);
}

// Query tiles that need no mask: those from a query in [first, first + more] on.
struct WholeTiles {
  int first = 0x7fffffff, more = 0;  // none
  FLASH3_HOST_DEVICE constexpr bool hold(int query) const {
    return unsigned(query) - unsigned(first) <= unsigned(more);
  }
};

// The tiles whose queries all see all of these keys of the work. Bounds never decrease, so that
// they are one after the other, also in chunks.
FLASH3_HOST_DEVICE constexpr WholeTiles whole_tiles(const KeyTile& work, TileMask::Range keys,
                                                    int tile_m) {
  const int first = work.queries.first(keys.end - 1), end = work.queries.end(keys.begin);
  WholeTiles tiles{first > 0 ? first : 0, 0};
  tiles.more = end - tile_m - tiles.first;
  return keys.end > work.sequence.k_length || tiles.more < 0 ? WholeTiles{} : tiles;
}

// In turn: how many blocks add to this query tile of the work before its own does. They come in the
// order in which the key tiles of a head are handed out: without a band from the first, under a
// band from the last. There all begin to walk at once, and the key tile further back, which begins
// further back, comes first to every query tile that both see. Every key tile from the first to the
// last that a query tile sees part of has a pair with it, also in chunks: query i sees its own
// place on the diagonal, so that neither side's tiles leave a gap.
FLASH3_HOST_DEVICE constexpr int turn_of(const KeySchedule& schedule, const KeyTile& work,
                                         int tile_n, bool band, int query_tile) {
  const int n = work.key / tile_n, tile_m = schedule.query_tiles.tile_m;
  if (!band) return n;
  const int query = query_tile * tile_m, end = query + tile_m, seq_q = work.sequence.q_length;
  const TileMask::Range queries = {query, end < seq_q ? end : seq_q};
  return work.queries.transposed().key_tiles(queries, work.sequence.k_length, tile_n).end - 1 - n;
}

}  // namespace flash3::hopper
