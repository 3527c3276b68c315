// SPDX-License-Identifier: Apache-2.0
// What the kernels of the gradients of biases are launched with. Host and device.
#pragma once

#include "core/mask_lists.hpp"
#include "cuda/device/score/bias.hpp"
#include "cuda/device/types.hpp"
#include "cuda/sm90/backward/params.h"

namespace flash3::cuda::sm90 {

// The gradient of a bias of each pair, [batch, heads, rows, keys]. A dimension of one element is
// summed over. Of packed queries with rows batch is 1, and a row is of one sequence.
struct PairGradient {
  void* data;  // null: not wanted
  FloatType type;
  long long stride_batch, stride_head, stride_row, stride_key;
  int batch, heads, rows, keys;
  bool sums_batch, sums_heads, sums_rows;
  bool by_sequence;  // rows are those of packed queries
};

// A sum over sequences in parts, each by blocks of its own: float32 [parts, heads, rows, keys].
struct PairParts {
  float* data;
  int parts;      // 1: there are none
  int sequences;  // of each, but the last may have fewer
};

// Sums of dS by j − i, from which the gradients of a table and of slopes follow. A block sums the
// tiles on one diagonal of a head, of a sequence or of all: float32 [sequences, heads_q,
// diagonals, kWindow].
struct DiagonalSums {
  static constexpr int kWindow = 192;  // distances of a tile of 128 × 64, or of 64 × 64

  float* data;
  int sequences;  // 1: those of all sequences are one sum
  int diagonals;
  int first;  // the first one's number, n − (queries / keys of a tile) · m
};

struct BiasGradientParams {
  TensorMap q, dout;  // box [kTileM, chunk]
  TensorMap k, v;     // box [kTileN, chunk]
  RowMap q_rows, dout_rows, k_rows, v_rows;
  BiasParams biased;
  Softcap softcap;  // unit: 1
  TileMaskRule rule;
  bool lists;
  MaskMemory mask;         // only where lists
  QueryTiles query_tiles;  // in which the workspace has the next two
  const float* lse_log2;
  const float* delta;
  ListedSequence one_length;
  SequenceList sequences;
  int batch, heads_q, heads_per_kv_head;
  int m_tiles;             // of the longest sequence
  int blocks_x, blocks_y;  // see SumPlace
  bool same_terms;         // all tiles of a block's sum get the same
  PairGradient pairs;
  PairParts parts;  // of pairs, which is one of them then
  DiagonalSums diagonals;
};

// What the sums on diagonals become.
struct DistanceGradients {
  DiagonalSums sums;
  TileMaskRule rule;
  ListedSequence one_length;
  SequenceList sequences;
  int heads_q, keys_per_query_tile;  // of a tile: how many key tiles are as long as a query tile
  float* table;                      // [heads, 2 · reach + 1]; null: not wanted
  long long table_head;
  int table_heads, reach;
  float* slopes;  // [batch, heads_q]; null: not wanted
  long long slopes_batch, slopes_head;
  int slopes_batches;
};

}  // namespace flash3::cuda::sm90
