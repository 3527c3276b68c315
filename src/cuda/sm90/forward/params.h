// SPDX-License-Identifier: Apache-2.0
// What a forward kernel is launched with. Plain data: filled by launch.cpp, read by every role;
// host and device, so no <cstdint>.
#pragma once

#include "core/mask_lists.hpp"
#include "core/scales.hpp"
#include "cuda/device/tile_schedule.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

// What FP8 calls alone have.
struct Fp8Params {
  ScaleView q_scale, k_scale, v_scale;
  float q_factor;           // of Q's scales: softmax_scale · log2 e, or 1 under a softcap
  bool q_packed, k_packed;  // scales are counted as those of packed tensors
  int flush_tiles;          // key tiles between two flushes of O, a power of two (output_sums.cuh)
  void* sums;               // where they go, if there is no room in shared memory
};

// What paged kernels alone have (key_pages.hpp): key j of sequence b lies in element table[b][j /
// page_size] of K and V.
struct KeyPages {
  const int* table;
  long long stride_table;  // from sequence to sequence
  int page_size;
  int elements;  // of K and V
  int box_rows;  // rows of a key tile that TMA loads at once: they never lie in two elements
};

// What split kernels alone have: the ring of slots in which splits lie, in the workspace. Each has
// float4 [warpgroups][head_dim_v / 8][128] of O and float4 [warpgroups][128] of maxima and sums, as
// threads hold them.
struct SplitSlots {
  int most;        // splits of a work tile; 1: all else is unused
  int bits, mask;  // there are 2^bits slots; mask: that less one
  void *out, *max_and_sum;
  int* arrived;  // [slots, warpgroups]: splits that are there of the tile that begins in it
  int* freed;    // [slots]: warpgroups that have done with the splits that lay in the slot, in all
};

// By how much, in base 2, a score may exceed its row's maximum before that is raised. p stays below
// 2^8, far from the largest float16; e4m3's largest number is 448 (kernel_fp8.cuh).
inline constexpr float kSlack = 8.f, kFp8Slack = 2.75f;

struct ForwardParams {
  TensorMap q;    // box [pack.queries, pack.heads, chunk]: one warpgroup's rows
  TensorMap k;    // box [tile_n, chunk]
  TensorMap v;    // box [tile_n / raw_v_parts, chunk]
  TensorMap out;  // box as q's; only if out_by_tma
  // Where work tiles have slots (TileSchedule), boxes have slot_rows rows.
  RowMap q_rows, k_rows, v_rows, out_rows;

  // [batch, seq_q, heads_q, head_dim_v], for rows that TMA does not store. out_in_quads: each four
  // columns of it lie in as many aligned bytes.
  void* out_data;
  FloatType out_type;
  bool out_in_quads;
  long long out_stride_batch, out_stride_seq, out_stride_head;
  RowOutputs rows;

  SinkRow sink;

  float scale_log2;   // softmax_scale · log2 e
  float score_slack;  // kSlack or kFp8Slack in units of a score
  float least_exact;  // where a row's maximum is lower the largest score of a tile must be exact
  int head_dim_v;
  HeadPack pack;           // of each warpgroup
  int groups_per_kv_head;  // head groups: pack.heads query heads each
  bool out_by_tma;

  TileSchedule schedule;  // with the shape of the problem

  Softcap softcap;    // only of a kernel with one; unit: softcap · log2 e
  Fp8Params fp8;      // only of a kernel whose keys are FP8
  KeyPages pages;     // only of a paged kernel
  SplitSlots splits;  // only of a split kernel
  MaskMemory mask;    // only of a kernel that walks lists
};

}  // namespace flash3::cuda::sm90
