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
  float* dq;        // [batch, heads_q, blocks, 64 · 64]: float32 sums, see DqBlock
  int dq_columns;   // of a row of dq: the kernel's head_dim
  int* turns;       // [batch, heads_q, query tiles, kTurns] of deterministic sums; null: any order
  int turns_of_tile_rows;  // rows of a query tile
};

// A query tile's sums are added to by two warpgroups of each block, in parts that do not overlap.
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
  // A step of 64 queries from `query` on sees all of the 64 keys from `key` on iff
  //   0 ≤ query + (seq_k − key) − first_whole ≤ whole_steps
  int first_whole, whole_steps;

  // The order of work: see decode_key_tile.
  int n_tiles;
  int kv_heads;            // batch · heads_k
  int kv_heads_at_a_time;  // consecutive ones whose Q and dOut share the L2 cache

  // Deterministic sums: see turn_of(). Blocks take the next index here, so that they begin in
  // order; null: their own index.
  int* ticket;
  int group;    // consecutive key tiles whose blocks run at the same time
  int stagger;  // without a band: query tiles from where one of them begins to where the next does
};

// The work of one block.
struct KeyTile {
  int key;  // the first one
  int kv_head, batch;
  int query_tile_begin, query_tile_end;  // query tiles that the mask leaves, half-open
  int query_tile_first;                  // where the walk over them begins; it wraps at their end

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
FLASH3_HOST_DEVICE constexpr KeyTile decode_key_tile(const BackwardParams& params, int tile_m,
                                                     int tile_n, bool band, int index) {
  const int n_tiles = params.n_tiles, at_a_time = params.kv_heads_at_a_time;
  const int first_head = index / (at_a_time * n_tiles) * at_a_time;
  const int heads_left = params.kv_heads - first_head;
  const int heads = at_a_time < heads_left ? at_a_time : heads_left;
  const int place = index - first_head * n_tiles;
  const int n = band ? place / heads : place % n_tiles;
  const int head = first_head + (band ? place % heads : place / n_tiles);

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
  work.query_tile_first = work.query_tile_begin;
  if (!band && work.query_tile_end > 0)
    work.query_tile_first = n % params.group * params.stagger % work.query_tile_end;
  return work;
}

// Deterministic sums: how many blocks add to this query tile before key tile n does.
//
// The key tiles of a head are cut into groups whose blocks run at the same time, one group after
// the other. In a group all blocks walk in step: the block of a key tile further back begins
// further back, and so comes first to every query tile that both see. In this order nobody waits,
// as long as all are equally fast. Without a band the walks wrap.
FLASH3_HOST_DEVICE constexpr int turn_of(const BackwardParams& params, int tile_m, int tile_n,
                                         bool band, int n, int query_tile) {
  const int group_begin = n / params.group * params.group;
  const int end = group_begin + params.group;
  const int group_end = end < params.n_tiles ? end : params.n_tiles;
  if (!band) {
    const int size = group_end - group_begin, last = query_tile / params.stagger;
    const int first = last < size ? last : size - 1;  // of the group, to come to this tile
    return group_begin + (first - (n - group_begin) + size) % size;
  }
  const Band keys_band = {-params.queries.hi, -params.queries.lo};
  const int query = query_tile * tile_m, query_end = query + tile_m;
  const Range queries = {query, query_end < params.rows.seq_q ? query_end : params.rows.seq_q};
  const Range tiles = keys_band.key_tiles(queries, params.seq_k, tile_n);
  const int before = group_begin - int(tiles.begin);  // of earlier groups
  const int last = (int(tiles.end) < group_end ? int(tiles.end) : group_end) - 1;
  return (before > 0 ? before : 0) + last - n;
}

}  // namespace flash3::hopper
