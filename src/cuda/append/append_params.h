// SPDX-License-Identifier: Apache-2.0
// What the append kernels are launched with.
#pragma once

#include "core/kv_cache.hpp"
#include "cuda/device/types.hpp"
#include "cuda/quantize/params.h"
#include "cuda/varlen/lengths.h"

namespace flash3::cuda {

inline constexpr int kAppendThreads = 256;
inline constexpr int kAppendTokens = 8;  // that a block has at once
inline constexpr int kPiece = 8;         // columns
inline constexpr int kMostLanes = 32;    // of a rotated row

// The rows of k, v or q that are written, and where to.
struct CopiedRows {
  const void* from;
  long long from_batch, from_row, from_head;
  void* to;
  long long to_batch, to_row, to_head;
  int heads, dim;
  bool in_pieces;   // both sides: rows begin at multiples of a piece's bytes, and dim is one of 8
  ScaleView scale;  // of an e4m3 cache

  FLASH3_HOST_DEVICE int pieces() const { return ceil_div(dim, kPiece); }
};

struct AppendParams {
  CopiedRows k, v, q;
  SequenceLengths keys, added, queries;
  const int* page_table;  // or null
  long long page_table_stride;
  int page_size;
  const int* batch_idx;  // or null
  int elements;          // of K and V
  RotaryTables rotary;   // half 0: none
  long long positions;   // of the tables
  const int* offsets;    // of the embedding; or null
  bool queries_advance;  // otherwise all queries of a sequence have one position
  int batch, blocks, q_blocks;
  int lanes;            // of a rotated row, eight columns each: 8, 16 or 32
  RotationSigns signs;  // of the rotation
};

// The kernel for tokens of `from`, or queries of it, and a cache of `to`.
const void* append_function(Element from, Element to, bool rotates);

}  // namespace flash3::cuda
