// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

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

// [head] or [batch, head] float32 that a call reads; of the first stride_batch is 0.
struct HeadsView {
  const float* data = nullptr;  // null: not given (or the call is only a question)
  bool given = false;
  int64_t stride_batch = 0, stride_head = 0;

  // The element of a sequence's query head; 0 without data.
  float at(int64_t batch, int64_t head) const {
    return data ? data[batch * stride_batch + head * stride_head] : 0.f;
  }
};

// [2] int64 that a call reads: a seed and an offset.
struct StateView {
  const int64_t* data = nullptr;  // null: not given (or the call is only a question)
  bool given = false;
};

}  // namespace flash3
