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

}  // namespace flash3
