// SPDX-License-Identifier: Apache-2.0
// What all forward kernels are launched with. Plain data: filled by launch.cpp, read by every role;
// host and device, so no <cstdint>. Beside it those of FP8 have scales (params_fp8.h), and those of
// caches and of lists what they walk over (kernel_params.h).
#pragma once

#include "cuda/device/tile_schedule.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

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

  Softcap softcap;  // only of a kernel with one; unit: softcap · log2 e
};

}  // namespace flash3::cuda::sm90
