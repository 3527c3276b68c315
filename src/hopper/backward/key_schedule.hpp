// SPDX-License-Identifier: Apache-2.0
// The work of the main kernel: a block has a tile of keys of one KV head of a sequence, and walks
// over the query tiles that see it. Integers only, host and device.
#pragma once

#include "core/arithmetic.hpp"
#include "hopper/device/sequence.hpp"

namespace flash3::hopper {

// How query tiles lie in the workspace: [batch, heads_q, tiles]. Packed sequences follow each
// other, [heads_q, tiles], and sequence b begins b tiles later than the rows before it fill. So
// each begins at a tile of its own without knowing the lengths of the others.
struct QueryTiles {
  bool packed;
  int heads_q;
  int tile_m;
  int tiles;  // of each head

  // The first tile of a sequence and of the first head; that of the next head is `tiles` further.
  // q_first: the sequence's first row in a packed tensor.
  FLASH3_HOST_DEVICE constexpr int first(int batch, int q_first) const {
    return packed ? q_first / tile_m + batch : batch * heads_q * tiles;
  }
};

struct KeySchedule {
  TileMaskRule rule;
  QueryTiles query_tiles;
  int heads_k;
  // Blocks add to the sums of dQ in a fixed order. They take their index from a ticket then, so
  // that they begin in order, and a block waits only for blocks that have begun.
  bool deterministic;
  // Deterministic, without a band: each key tile's walk begins ahead of that of the one before, and
  // what it adds before it comes round to query tile 0 goes to second sums.
  bool shifted;
  // Deterministic, under a band: every second few heads go from the first key tile to the last.
  bool alternates;
  // If all sequences have one length: the first sequence, with the tiles of all kv_heads = batch ·
  // heads_k heads. Otherwise a list holds the sequences, with tiles of keys.
  ListedSequence one_length;
  int kv_heads;
  SequenceList sequences;
};

// The work of one block.
struct KeyTile {
  bool valid;      // false: there are fewer tiles than blocks
  bool backwards;  // it walks from the last query tile to the first
  int key;         // the tile's first one
  int kv_head;
  int query_tile_begin, query_tile_end;  // query tiles that the mask leaves, half-open
  int first_query_tile;                  // of the sequence, in the workspace
  ListedSequence sequence;
  TileMask queries;  // the transposed mask: which queries see a key
  int n;             // which of the sequence's tiles
  // The walk. Shifted: it begins so many query tiles behind the first, and of each query tile there
  // are so many sixteenths of a key tile whose walks begin with it.
  int walk_shift, walk_sixteenths;
  int mirror;  // backwards: the sum of the first query tile and the last; otherwise 0

  FLASH3_HOST_DEVICE constexpr int query_tiles() const {
    return query_tile_end > query_tile_begin ? query_tile_end - query_tile_begin : 0;
  }
  FLASH3_HOST_DEVICE constexpr int next(int place) const {
    return place + 1 == query_tile_end ? query_tile_begin : place + 1;
  }
  // The query tile at a place of the walk, which counts from query_tile_begin.
  FLASH3_HOST_DEVICE constexpr int query_tile(int place) const {
    const int distance = place - mirror;
    return distance < 0 ? -distance : distance;
  }
  // The i-th place of the walk, of query_tiles().
  FLASH3_HOST_DEVICE constexpr int walk_place(bool band, int i) const {
    if (band) return query_tile_begin + i;
    const int place = walk_shift + i;
    return place < query_tile_end ? place : place - query_tile_end;
  }
  FLASH3_HOST_DEVICE constexpr bool adds_to_second_sums(int query_tile) const {
    return walk_shift > 0 && query_tile >= walk_shift;
  }

  // How many keys of the tile no query of the sequence sees, because they lie in front of the first
  // query's window or chunk. At most 0 if there are none.
  FLASH3_HOST_DEVICE constexpr int hidden_keys() const {
    return queries.transposed().first(0) - key;
  }
};

// Makes the work of tile n of a KV head of a sequence.
FLASH3_HOST_DEVICE constexpr KeyTile key_tile(const KeySchedule& schedule,
                                              const ListedSequence& sequence, int n, int kv_head,
                                              int tile_n, bool band, bool backwards) {
  const int tile_m = schedule.query_tiles.tile_m;
  KeyTile work{};
  work.valid = true;
  work.key = n * tile_n;
  work.n = n;
  work.backwards = backwards;
  work.kv_head = kv_head;
  work.first_query_tile = schedule.query_tiles.first(sequence.batch, sequence.q_first);
  work.sequence = sequence;
  work.queries = TileMask::make(sequence.q_length, sequence.k_length, schedule.rule).transposed();
  const int end = work.key + tile_n;
  const TileMask::Range keys = {work.key, end < sequence.k_length ? end : sequence.k_length};
  if (keys.empty()) return work;  // all keys are unused: their gradients are zeros
  work.query_tile_end = ceil_div(sequence.q_length, tile_m);
  if (band) {
    const TileMask::Range tiles = work.queries.key_tiles(keys, sequence.q_length, tile_m);
    work.query_tile_begin = tiles.begin;
    work.query_tile_end = tiles.end;
  } else if (schedule.shifted && work.query_tile_end > 0) {
    work.walk_sixteenths = ceil_div(ceil_div(sequence.k_length, tile_n) * 16, work.query_tile_end);
    const int ahead = n * 16 / work.walk_sixteenths;
    work.walk_shift = ahead > 0 ? work.query_tile_end - ahead : 0;
  }
  if (backwards) work.mirror = work.query_tile_begin + work.query_tile_end - 1;
  return work;
}

// Blocks take the tiles of a few KV heads at a time. Within these heads the order is
//   full            all key tiles of one head after the other
//   band            the first key tile of each head, then the second of each: under a causal mask
//                   the longest come first
//   deterministic   one key tile of each head at a time, from the first, or under a band from the
//                   last; or there in turn from the last and from the first, so that a
//                   multiprocessor whose key tile of some heads was short has a long one of others
struct KeyTilePlace {
  int n, head;
  bool backwards;  // the walk
};
// The place of the index-th tile.
FLASH3_HOST_DEVICE constexpr KeyTilePlace key_tile_place(const KeySchedule& schedule, int n_tiles,
                                                         int heads, int at_a_time, bool band,
                                                         int index) {
  const int turn = index / (at_a_time * n_tiles), first_head = turn * at_a_time;
  const int heads_left = heads - first_head;
  const int together = at_a_time < heads_left ? at_a_time : heads_left;
  const int place = index - first_head * n_tiles;
  if (!band && !schedule.deterministic)
    return {place % n_tiles, first_head + place / n_tiles, false};
  const int n = place / together, head = first_head + place % together;
  if (!band || !schedule.deterministic) return {n, head, false};
  const bool backwards = schedule.alternates && turn % 2 == 1;
  return {backwards ? n : n_tiles - 1 - n, head, backwards};
}

// Makes the work of the index-th tile: of a listed sequence, whose heads are heads_k, or of all
// sequences if they have one length. The work is not valid if there are fewer tiles.
FLASH3_HOST_DEVICE constexpr KeyTile decode_key_tile(const KeySchedule& schedule,
                                                     ListedSequence sequence, int heads, int tile_n,
                                                     bool band, int index) {
  if (index < 0 || index >= sequence.tiles * heads) return {};
  const KeyTilePlace at =
      key_tile_place(schedule, sequence.tiles, heads, sequence.groups_at_a_time, band, index);
  sequence.batch += at.head / schedule.heads_k;
  return key_tile(schedule, sequence, at.n, at.head % schedule.heads_k, tile_n, band, at.backwards);
}

// The query tiles that need no mask: they begin at a query in [first, first + more].
struct WholeTiles {
  int first = 0x7fffffff, more = 0;  // none
  FLASH3_HOST_DEVICE constexpr bool hold(int query) const {
    return unsigned(query) - unsigned(first) <= unsigned(more);
  }
};

// Finds the tiles whose queries all see all of these keys of the work. The bounds of the mask never
// decrease, also in chunks, so that these tiles follow each other.
FLASH3_HOST_DEVICE constexpr WholeTiles whole_tiles(const KeyTile& work, TileMask::Range keys,
                                                    int tile_m) {
  const int first = work.queries.first(keys.end - 1), end = work.queries.end(keys.begin);
  WholeTiles tiles{first > 0 ? first : 0, 0};
  tiles.more = end - tile_m - tiles.first;
  return keys.end > work.sequence.k_length || tiles.more < 0 ? WholeTiles{} : tiles;
}

// Deterministic: how many blocks add to this query tile, to its first sums or to its second ones,
// before the block of this work: those of the key tiles that blocks took before, of which none
// waits for one that has not begun. That is the key tiles in front, or, under a band and not
// backwards, those behind.
//
// Under a band all blocks begin to walk at once, and the key tile further back, which begins
// further back, is first at every query tile that both see. Backwards all begin with the last query
// tile, but one after the other: each on a multiprocessor whose block of the heads before was a
// query tile longer.
//
// Shifted walks come to a query tile in the order of the key tiles twice: first those that begin at
// it or in front, with the largest n, then those that come round. In one sum the former would be
// before the latter, hence two.
//
// Every key tile from the first to the last that a query tile sees part of has a pair with it, also
// in chunks: query i sees its own place on the diagonal, so that neither side's tiles leave a gap.
FLASH3_HOST_DEVICE constexpr int dq_order(const KeySchedule& schedule, const KeyTile& work,
                                          int tile_n, bool band, int query_tile) {
  const int n = work.n, tile_m = schedule.query_tiles.tile_m;
  if (!band) {
    if (!work.adds_to_second_sums(query_tile)) return n;
    // Behind the first key tile whose walk begins here or in front.
    return n - ceil_div((work.query_tile_end - query_tile) * work.walk_sixteenths, 16);
  }
  const int query = query_tile * tile_m, end = query + tile_m, seq_q = work.sequence.q_length;
  const TileMask::Range queries = {query, end < seq_q ? end : seq_q};
  const TileMask::Range keys =
      work.queries.transposed().key_tiles(queries, work.sequence.k_length, tile_n);
  return work.backwards ? n - keys.begin : keys.end - 1 - n;
}

}  // namespace flash3::hopper
