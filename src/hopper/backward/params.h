// What the backward kernels are launched with. Plain data: filled by launch.cpp; host and device,
// so no <cstdint>.
#pragma once

#include "core/band.hpp"
#include "hopper/device/tensor_map.h"

namespace flash3::hopper {

// A strided view of 16-bit elements, [batch, seq, head, dim].
struct ElementView {
  unsigned short* data;
  long long stride_batch, stride_seq, stride_head;
  bool aligned;  // base and strides are multiples of 16 bytes
};

// A strided view of floats, [batch, head, seq]; data null: not given.
struct RowView {
  const float* data;
  long long stride_batch, stride_head;
};

// Rows of the workspace, one per query of a padded sequence: [batch, heads_q, padded_q].
struct BackwardRows {
  int batch, heads_q, seq_q;
  int padded_q;     // seq_q rounded up to query tiles
  float* lse_log2;  // lse · log2 e; +∞ for rows past the end and rows that see no key
  float* delta;     // rowsum(dOut ∘ Out) − dlse
  float* dq;        // [batch, heads_q, blocks, 64 · 64]: float32 sums, see README.md
  int dq_columns;   // of a row of dq: the kernel's head_dim
  int* turns;       // [batch, heads_q, query tiles, kTurns] of deterministic sums; null: any order
  int turns_of_tile_rows;  // rows of a query tile
};

// A query tile's sums are added to in up to two parts that do not overlap.
inline constexpr int kTurns = 2;

struct BackwardParams {
  TensorMap q;     // box [tile_m, chunk]
  TensorMap dout;  // box [tile_m, chunk]
  TensorMap k;     // box [tile_n, chunk]
  TensorMap v;     // box [tile_n, chunk]
  TensorMap dk;    // box [64, chunk]; only if dk_by_tma
  TensorMap dv;    // box [64, chunk]; only if dv_by_tma

  BackwardRows rows;
  ElementView dk_out, dv_out;
  bool dk_by_tma, dv_by_tma;

  float softmax_scale;
  float scale_log2;  // softmax_scale · log2 e
  int head_dim, head_dim_v;
  int seq_k, heads_k;
  int heads_per_kv_head;

  // Key j sees query i iff j + queries.lo ≤ i ≤ j + queries.hi: the band, transposed, and cut to
  // where no sum with a row overflows 32 bits.
  Band queries;
  // A step of queries from `query` on sees all of the 64 keys from `key` on iff
  //   0 ≤ query + (seq_k − key) − first_whole ≤ whole_steps
  int first_whole, whole_steps;

  // The order of work: see decode_key_tile.
  int n_tiles;
  int kv_heads;            // batch · heads_k
  int kv_heads_at_a_time;  // consecutive ones: see plan_backward

  // Deterministic sums: blocks take the next index here, so that they begin in order, and a block
  // only ever waits for ones that have begun. Null: each takes its own index.
  int* ticket;
};

// The work of one block.
struct KeyTile {
  int key;  // the first one
  int kv_head, batch;
  int query_tile_begin, query_tile_end;  // query tiles that the mask leaves, half-open

  FLASH3_HOST_DEVICE constexpr int query_tiles() const {
    return query_tile_end > query_tile_begin ? query_tile_end - query_tile_begin : 0;
  }
  FLASH3_HOST_DEVICE constexpr int next(int query_tile) const {
    return query_tile + 1 == query_tile_end ? query_tile_begin : query_tile + 1;
  }
};

// The index-th block's work. A few KV heads at a time, and within those
//   full   all key tiles of one head after the other
//   band   the first key tile of each head in turn, then the second: under a causal mask the
//          longest come first
// Deterministic: one key tile of each head in turn, from the first, or under a band from the last.
FLASH3_HOST_DEVICE constexpr KeyTile decode_key_tile(const BackwardParams& params, int tile_m,
                                                     int tile_n, bool band, int index) {
  const int n_tiles = params.n_tiles, at_a_time = params.kv_heads_at_a_time;
  const int first_head = index / (at_a_time * n_tiles) * at_a_time;
  const int heads_left = params.kv_heads - first_head;
  const int heads = at_a_time < heads_left ? at_a_time : heads_left;
  const int place = index - first_head * n_tiles;
  const bool in_turn = params.rows.turns != nullptr;
  int n = band || in_turn ? place / heads : place % n_tiles;
  if (band && in_turn) n = n_tiles - 1 - n;
  const int head = first_head + (band || in_turn ? place % heads : place / n_tiles);

  KeyTile work{};
  work.key = n * tile_n;
  work.batch = head / params.heads_k;
  work.kv_head = head % params.heads_k;
  work.query_tile_end = (params.rows.seq_q + tile_m - 1) / tile_m;
  if (band) {
    const int end = work.key + tile_n;
    const Range keys = {work.key, end < params.seq_k ? end : params.seq_k};
    const Range tiles = params.queries.key_tiles(keys, params.rows.seq_q, tile_m);
    work.query_tile_begin = int(tiles.begin);
    work.query_tile_end = int(tiles.end);
  }
  return work;
}

// Deterministic sums: how many blocks add to this query tile before key tile n does. They come in
// the order in which decode_key_tile() hands out the key tiles of a head: without a band from the
// first, under a band from the last. There all begin to walk at once, and the key tile further
// back, which begins further back, comes first to every query tile that both see.
FLASH3_HOST_DEVICE constexpr int turn_of(const BackwardParams& params, int tile_m, int tile_n,
                                         bool band, int n, int query_tile) {
  if (!band) return n;
  const Band keys_band = {-params.queries.hi, -params.queries.lo};
  const int query = query_tile * tile_m, query_end = query + tile_m;
  const Range queries = {query, query_end < params.rows.seq_q ? query_end : params.rows.seq_q};
  return int(keys_band.key_tiles(queries, params.seq_k, tile_n).end) - 1 - n;
}

}  // namespace flash3::hopper
