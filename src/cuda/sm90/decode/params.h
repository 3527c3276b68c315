// SPDX-License-Identifier: Apache-2.0
// What a decode kernel is launched with: plain data that launch.cpp fills and every role reads.
// Host and device, so no <cstdint>.
#pragma once

#include "core/scales.hpp"
#include "cuda/device/types.hpp"
#include "cuda/sm90/decode/config.hpp"
#include "cuda/sm90/decode/work.hpp"

namespace flash3::cuda::sm90 {

// Where K or V lies, for producers that gather rows themselves.
struct CacheView {
  const void* data;
  long long stride_element, stride_row, stride_head;
  int dim;
  bool by_pieces;  // rows begin at multiples of 16 bytes, and are whole pieces of 16 bytes
};

// What a kernel needs to know of a run: consecutive splits of an item that one block computes.
struct alignas(128) DecodeRun {
  int exists;  // 0: the block has no more work
  int batch, head_group, kv_head;
  int query, q_row;  // the item's first query, and its row in Q
  int rows;          // queries · heads
  int k_first, k_length;
  TileMask mask;
  TileMask::Range keys;             // keys that the queries see
  TileMask::Range tiles, unmasked;  // key tiles of the run; those that all queries see whole
  int split_tiles;
  TileMask::Range splits;  // of the item
  int first_split;         // of the run
  short has_first, is_whole;
  short merges, folds;             // whether it ends an item that others begin; of so many folds
  short fold_partials, ends_item;  // partials of the fold that it ends and others begin; whether
                                   // that is the item's last
  int next;                        // the block's next run
};
static_assert(sizeof(DecodeRun) == 128);
inline constexpr int kHeadGroupWord = 2;  // of a run: launch.cpp, which has offsetof, checks it

// The partials of what a block ends, in order. A partial has the number of its slot among all
// blocks' slots.
struct MergeLists {
  int rows;                     // of the block's first run, if there is something to merge, or 0
  int fold[kSplitsPerFold];     // partials of the fold that it shares with blocks before it
  int folds[kMostDecodeFolds];  // folds of the item
};

// What the schedule kernel makes of a call's lengths (schedule.cuh).
struct DecodeSchedule {
  DecodeRun* runs;    // the first of each block, then all others
  MergeLists* lists;  // of each block
};

struct DecodeParams {
  TensorMap k, v;  // boxes of box_rows rows; unless rows are gathered
  CacheView k_rows, v_rows;
  int box_rows;  // rows of K and V that lie side by side; 0: rows are gathered one by one

  const void* q;
  long long q_stride_batch, q_stride_row, q_stride_head;
  int head_dim;
  bool q_by_pieces;

  void* out;
  long long out_stride_batch, out_stride_row, out_stride_head;
  int head_dim_v;
  bool out_float32;  // otherwise of q's dtype
  RowOutputs rows;
  SinkRow sink;

  float scale_log2;  // softmax_scale · log2 e; under a softcap 1
  Softcap softcap;   // unit: softcap · log2 e

  // Which element of K and V the keys of a sequence lie in: pages, or one.
  const int* page_table;  // [batch, pages of a sequence], or null
  long long page_table_stride;
  int page_size;
  const int* batch_idx;  // or null
  int elements;          // of K and V
  bool k_packed;         // all keys lie in element 0

  int heads;  // query heads of an item
  DecodeSchedule schedule;

  // Shared items: what blocks have computed of them (partials.cuh).
  void* partials;
  int slots;                  // partials of a block
  unsigned long long ticket;  // of this launch
  int blocks;                 // that compute; those after them merge

  // Where K and V are e4m3.
  Element q_type;
  bool out_bfloat16;  // unless float32; otherwise float16
  bool capped, q_packed;
  ScaleView q_scale, k_scale, v_scale;

  // Of the latent kernels: q has the rope parts, this the latent parts.
  const void* q_latent;
  long long q_latent_stride_batch, q_latent_stride_row, q_latent_stride_head;
  int cluster;  // blocks that read the same keys for different heads: 1 or 2

  // Which of its sequence's last keys a query sees, a bit each, or null: all that the mask shows.
  const unsigned long long* tree;
  long long tree_stride_batch;
};

// What a schedule kernel is launched with.
struct DecodeScheduleParams {
  DecodeRule rule;
  int batch;
  int heads;          // query heads of an item
  int groups_per_kv;  // groups of so many heads that a KV head has
  int blocks;         // of the decode kernel
  int slots;
  bool lists_partials;  // otherwise ends_item of a run says only whether it has the item's last
                        // split
  DecodeSchedule schedule;
};

}  // namespace flash3::cuda::sm90
