// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flash3/types.h"

namespace flash3 {

// [batch, seq, head, dim], strides in elements, the last one is 1. The stride of a dimension with
// fewer than two elements is 0, whatever the caller gave. Packed tensors [total, head, dim] have
// the same form with stride_batch 0: batch is the number of sequences, seq the most tokens that one
// can have, and row i of sequence b is row rows_of(…, b).first + i of the tensor.
struct TensorView {
  void* data = nullptr;
  int64_t batch = 0, seq = 0, heads = 0, dim = 0;
  int64_t stride_batch = 0, stride_seq = 0, stride_head = 0;
};

// [batch, head, seq] float32, strides in elements, the last one is 1. Packed ones, [head, total],
// have stride_batch 0 and the rows of packed tensors.
struct LseView {
  float* data = nullptr;  // null: not wanted (or the call is only a question)
  bool wanted = false;
  int64_t stride_batch = 0, stride_head = 0;
  bool of_heads = false;  // [head], one element for all rows of a head
};

// [head] or [batch, head] float32, or the gradient of one; of the first stride_batch is 0.
struct HeadsView {
  float* data = nullptr;  // null: not given (or the call is only a question)
  bool given = false;
  int64_t stride_batch = 0, stride_head = 0;
  bool of_batch = false;  // [batch, head]

  int64_t offset(int64_t batch, int64_t head) const {
    return batch * stride_batch + head * stride_head;
  }
  // The element of a sequence's query head; 0 without data.
  float at(int64_t batch, int64_t head) const { return data ? data[offset(batch, head)] : 0.f; }
};

// [batch, head, row, key] that is added to scores, or its gradient. Strides in elements; that of a
// dimension of one element is 0. Of packed queries stride_batch is 0, and row i of sequence b is
// row rows_of(…, b).first + i.
struct BiasView {
  void* data = nullptr;  // null: not given (or the call is only a question)
  flash3_dtype dtype = FLASH3_DTYPE_NONE;
  bool given = false;
  int64_t stride_batch = 0, stride_head = 0, stride_row = 0, stride_key = 0;
  int64_t batch = 0, heads = 0, rows = 0, keys = 0;  // its own sizes
  // Whether one element is for all sequences, query heads or rows of a sequence, of which there may
  // be more: a gradient is summed over these.
  bool sums_batch = false, sums_heads = false, sums_rows = false;

  bool is_summed() const { return sums_batch || sums_heads || sums_rows; }
  // row: i of a padded sequence, of a packed one with that of its first before it.
  int64_t offset(int64_t b, int64_t head, int64_t row) const {
    return b * stride_batch + head * stride_head + row * stride_row;
  }
};

// [head, 2·distance + 1] float32 that is added to scores by j − i', or its gradient; of one for all
// heads stride_head is 0.
struct BiasTableView {
  float* data = nullptr;  // null: not given (or the call is only a question)
  bool given = false;
  int64_t stride_head = 0, distance = 0;
  int64_t heads = 0;        // its own: 1 or all
  bool sums_heads = false;  // one for all query heads, of which there are more

  int64_t entries() const { return 2 * distance + 1; }
  // The place of an entry in its row, of j − i'.
  int64_t entry(int64_t from_diagonal) const {
    return (from_diagonal < -distance  ? -distance
            : from_diagonal > distance ? distance
                                       : from_diagonal) +
           distance;
  }
};

// [2] int64 that a call reads: a seed and an offset.
struct StateView {
  const int64_t* data = nullptr;  // null: not given (or the call is only a question)
  bool given = false;
};

}  // namespace flash3
