// SPDX-License-Identifier: Apache-2.0
// What the backward kernels are launched with. launch.cpp fills it. Plain data for host and device,
// so no <cstdint>.
#pragma once

#include "core/seq_info.hpp"
#include "cuda/device/types.hpp"
#include "cuda/sm90/backward/key_schedule.hpp"

namespace flash3::cuda::sm90 {

// A strided view of 16-bit elements, or of gradients in float32, [batch, seq, head, dim].
struct ElementView {
  void* data;
  long long stride_batch, stride_seq, stride_head;
  bool aligned;  // base and strides are multiples of 16 bytes
};

// A strided view of floats, [batch, head, seq]; data null: not given.
struct RowView {
  const float* data;
  long long stride_batch, stride_head;
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
