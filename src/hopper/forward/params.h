// What a forward kernel is launched with. Plain data: filled by launch.cpp, read by every role;
// host and device, so no <cstdint>.
#pragma once

#include "core/band.hpp"
#include "hopper/device/tensor_map.h"

namespace flash3::hopper {

// See device/scheduler.cuh.
struct TileCounterMemory {
  unsigned long long ticket;
  int next;
  int finished_blocks;
};

struct ForwardParams {
  TensorMap q;    // box [64 rows, chunk]: one warpgroup's rows
  TensorMap k;    // box [tile_n, chunk]
  TensorMap v;    // box [tile_n, chunk]
  TensorMap out;  // box [64 rows, chunk]; only if out_by_tma

  unsigned short* out_data;  // [batch, seq_q, heads_q, head_dim_v], for rows that TMA cannot store
  long long out_stride_batch, out_stride_seq, out_stride_head;
  float* lse;  // [batch, heads_q, seq_q] or null
  long long lse_stride_batch, lse_stride_head;

  Band band;  // cut to ±kMaxLength, so that the kernel can add rows to it in 32 bits
  float softmax_scale;
  float scale_log2;  // softmax_scale · log2 e
  int seq_q, seq_k;
  int head_dim_v;
  int heads_q, queries_per_kv_head;

  // Work tiles: see device/scheduler.cuh.
  int m_tiles;         // per head
  int heads_in_group;  // consecutive (batch, head) pairs whose K and V share the L2 cache
  int batch_heads;     // batch · heads_q
  int tiles;           // in all
  TileCounterMemory* tile_counter;  // null: tiles are dealt out in turn
  unsigned long long ticket;        // of this launch

  bool out_by_tma;
};

}  // namespace flash3::hopper
