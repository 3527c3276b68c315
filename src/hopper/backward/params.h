// SPDX-License-Identifier: Apache-2.0
// What the backward kernels are launched with. Plain data: filled by launch.cpp; host and device,
// so no <cstdint>.
#pragma once

#include "core/seq_info.hpp"
#include "hopper/backward/key_schedule.hpp"
#include "hopper/device/softcap.hpp"
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

// Rows of the workspace, one per query of the query tiles.
struct BackwardRows {
  QueryTiles tiles;
  Sequences sequences;  // of queries
  int batch;            // so many
  float* lse_log2;      // lse · log2 e; +∞ for rows past the end and rows that see no key
  float* delta;         // rowsum(dOut ∘ Out) − dlse
  float* dq;            // [query tiles, blocks, 64 · 64]: float32 sums, see README.md
  int dq_columns;       // of a row of dq: the kernel's head_dim
  int* turns;           // [query tiles, kTurns], counters of those who have added to the sums
  bool zeroed;          // the sums begin as zeros; else the first to come stores, and those of a
                        // tile that nobody has come to are not written

  // Query tiles of all heads and sequences.
  FLASH3_HOST_DEVICE constexpr int all_tiles() const {
    return (tiles.packed ? 1 : batch) * tiles.heads_q * tiles.tiles;
  }
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
  RowMap q_rows, dout_rows, k_rows, v_rows, dk_rows, dv_rows;

  BackwardRows rows;
  ElementView dk_out, dv_out;
  bool dk_by_tma, dv_by_tma;

  float softmax_scale;
  float scale_log2;  // softmax_scale · log2 e; under a softcap softcap · log2 e
  int head_dim, head_dim_v;
  int heads_per_kv_head;

  KeySchedule schedule;
  int* ticket;      // schedule.in_turn: the next block's index. Null: each takes its own
  Softcap softcap;  // only of a kernel with one; unit: 1
};

}  // namespace flash3::hopper
