// SPDX-License-Identifier: Apache-2.0
// What the backward kernels are launched with, which launch.cpp fills, and the work that follows
// from it: a block of the main kernel has a tile of keys of one KV head of a sequence, and walks
// over the query tiles that see it. Host and device, so no <cstdint>.
#pragma once

#include "core/seq_info.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

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
  // Blocks add to the sums of dQ in a fixed order. Key tiles are taken by a ticket then, so that a
  // block waits only for key tiles that were taken before its own.
  bool deterministic;
  // If all sequences have one length: the first sequence, with the tiles of all kv_heads = batch ·
  // heads_k heads. Otherwise a list holds the sequences, with tiles of keys.
  ListedSequence one_length;
  int kv_heads;
  SequenceList sequences;
};

// The work of a block, or what a persistent block does next.
struct KeyTile {
  bool valid;  // false: there are fewer tiles than blocks
  int key;     // the tile's first one
  int kv_head;
  int query_tile_begin, query_tile_end;  // query tiles that the mask leaves, half-open
  int first_query_tile;                  // of the sequence, in the workspace
  ListedSequence sequence;
  TileMask queries;  // the transposed mask: which queries see a key

  FLASH3_HOST_DEVICE constexpr int query_tiles() const {
    return query_tile_end > query_tile_begin ? query_tile_end - query_tile_begin : 0;
  }
  FLASH3_HOST_DEVICE constexpr int next(int query_tile) const {
    return query_tile + 1 == query_tile_end ? query_tile_begin : query_tile + 1;
  }

  // How many keys of the tile no query of the sequence sees, because they lie before the first
  // query's window or chunk. At most 0 if there are none.
  FLASH3_HOST_DEVICE constexpr int hidden_keys() const {
    return queries.transposed().firsts({0, sequence.q_length}).least - key;
  }
};

// Makes the work of tile n of a KV head of a sequence.
FLASH3_HOST_DEVICE constexpr KeyTile key_tile(const KeySchedule& schedule,
                                              const ListedSequence& sequence, int n, int kv_head,
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
  if (keys.empty()) return work;  // all keys are unused: their gradients are zeros
  work.query_tile_end = ceil_div(sequence.q_length, tile_m);
  if (band) {
    const TileMask::Range tiles = work.queries.key_tiles(keys, sequence.q_length, tile_m);
    work.query_tile_begin = tiles.begin;
    work.query_tile_end = tiles.end;
  }
  return work;
}

// Blocks take the tiles of a few KV heads at a time. Within these heads the order is
//   full            all key tiles of one head after the other
//   band            the first key tile of each head, then the second of each: under a causal mask
//                   the longest come first
//   deterministic   one key tile of each head at a time, from the first, or under a band from the
//                   last
struct KeyTilePlace {
  int n, head;
};
// The place of the index-th tile.
FLASH3_HOST_DEVICE constexpr KeyTilePlace key_tile_place(int n_tiles, int heads, int at_a_time,
                                                         bool band, bool deterministic, int index) {
  const int first_head = index / (at_a_time * n_tiles) * at_a_time;
  const int heads_left = heads - first_head;
  const int together = at_a_time < heads_left ? at_a_time : heads_left;
  const int place = index - first_head * n_tiles;
  if (!band && !deterministic) return {place % n_tiles, first_head + place / n_tiles};
  const int n = place / together;
  return {band && deterministic ? n_tiles - 1 - n : n, first_head + place % together};
}

// Under lists the first key tile of all heads comes before any other: its list may be far longer,
// that of sink tokens or of a prefix, and would be the last to end.
FLASH3_HOST_DEVICE constexpr KeyTilePlace listed_tile_place(int n_tiles, int heads, int at_a_time,
                                                            int index) {
  if (index < heads) return {0, index};
  const KeyTilePlace at = key_tile_place(n_tiles - 1, heads, at_a_time, true, false, index - heads);
  return {at.n + 1, at.head};
}

// Makes the work of the index-th tile: of a listed sequence, whose heads are heads_k, or of all
// sequences if they have one length. The work is not valid if there are fewer tiles.
FLASH3_HOST_DEVICE constexpr KeyTile key_tile_at(const KeySchedule& schedule,
                                                 ListedSequence sequence, int heads, int tile_n,
                                                 bool band, int index, bool lists = false) {
  if (index < 0 || index >= sequence.tiles * heads) return {};
  const KeyTilePlace at =
      lists && !schedule.deterministic
          ? listed_tile_place(sequence.tiles, heads, sequence.groups_at_a_time, index)
          : key_tile_place(sequence.tiles, heads, sequence.groups_at_a_time, band,
                           schedule.deterministic, index);
  sequence.batch += at.head / schedule.heads_k;
  return key_tile(schedule, sequence, at.n, at.head % schedule.heads_k, tile_n, band);
}

// The query tiles that need no mask: they begin at a query in [first, first + more].
struct WholeTiles {
  int first = 0x7fffffff, more = 0;  // none
  FLASH3_HOST_DEVICE constexpr bool hold(int query) const {
    return unsigned(query) - unsigned(first) <= unsigned(more);
  }
};

// Finds the tiles whose queries all see all of these keys of the work.
FLASH3_HOST_DEVICE constexpr WholeTiles whole_tiles(const KeyTile& work, TileMask::Range keys,
                                                    int tile_m) {
  const int first = work.queries.firsts(keys).most, end = work.queries.ends(keys).least;
  WholeTiles tiles{first > 0 ? first : 0, 0};
  tiles.more = end - tile_m - tiles.first;
  return keys.end > work.sequence.k_length || tiles.more < 0 ? WholeTiles{} : tiles;
}

// Deterministic: how many blocks add to this query tile before the block of this work. Blocks add
// in the order in which they take the key tiles of a head: without a band from the first, under a
// band from the last. Under a band all blocks begin to walk at once, and the key tile further back,
// which begins further back, is first at every query tile that both see. Every key tile from the
// first to the last that a query tile sees part of has a pair with it, also in chunks: query i sees
// its own place on the diagonal, so that neither side's tiles leave a gap.
FLASH3_HOST_DEVICE constexpr int dq_order(const KeySchedule& schedule, const KeyTile& work,
                                          int tile_n, bool band, int query_tile) {
  const int n = work.key / tile_n, tile_m = schedule.query_tiles.tile_m;
  if (!band) return n;
  const int query = query_tile * tile_m, end = query + tile_m, seq_q = work.sequence.q_length;
  const TileMask::Range queries = {query, end < seq_q ? end : seq_q};
  return work.queries.transposed().key_tiles(queries, work.sequence.k_length, tile_n).end - 1 - n;
}

// ---- what a kernel is launched with ----

// A strided view of 16-bit elements, or of gradients in float32, [batch, seq, head, dim].
struct ElementView {
  void* data;
  long long stride_batch, stride_seq, stride_head;
  bool aligned;  // base and strides are multiples of 16 bytes
};

// The workspace: query tiles, and what the kernels keep of every query of these.
struct BackwardWorkspace {
  QueryTiles tiles;
  Sequences sequences;  // of queries
  int batch;
  float* lse_log2;  // lse · log2 e; +∞ for rows past the end and rows that see no key
  float* delta;     // rowsum(dOut ∘ Out) − dlse
  float* dq;        // [query tiles, blocks, 64 · 64]: float32 sums, see README.md
  int dq_columns;   // whole blocks: BackwardConfig
  // [query tiles, kDqParts]: how many blocks have added to the sums. Null: nothing needs it.
  int* dq_semaphores;
  // dQ is zero-initialised. Otherwise the first block that reaches a query tile stores its dQ, and
  // the sums of a tile that no block reaches stay unwritten.
  bool zeroed;

  // Query tiles of all heads and sequences.
  FLASH3_HOST_DEVICE constexpr int all_tiles() const {
    return (tiles.packed ? 1 : batch) * tiles.heads_q * tiles.tiles;
  }
};

// The sums of a query tile have up to two parts, one for each warpgroup that adds, with a semaphore
// each.
inline constexpr int kDqParts = 2;

struct BackwardParams {
  TensorMap q;     // box [tile_m, chunk]
  TensorMap dout;  // box [tile_m, chunk]
  TensorMap k;     // box [tile_n, chunk]
  TensorMap v;     // box [tile_n, chunk]
  TensorMap dk;    // box [64, chunk]; only if dk_by_tma
  TensorMap dv;    // box [64, chunk]; only if dv_by_tma
  RowMap q_rows, dout_rows, k_rows, v_rows, dk_rows, dv_rows;

  BackwardWorkspace workspace;
  ElementView dk_out, dv_out;
  bool dk_by_tma, dv_by_tma;
  bool float32_gradients;  // otherwise of q's dtype

  float softmax_scale;
  float scale_log2;  // softmax_scale · log2 e; under a softcap softcap · log2 e
  int head_dim, head_dim_v;
  int heads_per_kv_head;

  KeySchedule schedule;
  int* ticket;      // the index of the next key tile. Null: block b has the b-th one alone
  Softcap softcap;  // kernels with a softcap; unit: 1
};

}  // namespace flash3::cuda::sm90
