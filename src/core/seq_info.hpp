// SPDX-License-Identifier: Apache-2.0
// Where the sequences of a batch lie. Ragged or not, one description: the rows of sequence b of a
// tensor are those from `first` on in batch element b, and packed tensors have a batch stride of 0.
// Compiled on the host and, through NVRTC too, on the device: nothing but integers here.
#pragma once

#include "core/mask.hpp"

namespace flash3 {

// The sequences of q, or those of k.
struct Sequences {
  bool packed = false;        // cu is given
  bool has_used = false;      // used is given
  const int* cu = nullptr;    // [batch + 1]; null: not given, or the call is only a question
  const int* used = nullptr;  // [batch]; likewise
  Index rows = 0;             // of the tensor, for one batch element
  Index max_length = 0;       // no sequence has more tokens that count
  bool bounded = false;       // max_length is the caller's, not just the rows
};

// One sequence's rows in a tensor.
struct RowRange {
  Index first = 0;
  Index length = 0;    // the tokens that count
  Index capacity = 0;  // those and the unused ones after them
};

// The rows of sequence b. Whatever cu and used hold, they lie inside the tensor, and no length is
// above max_length.
FLASH3_HOST_DEVICE constexpr RowRange rows_of(const Sequences& sequences, Index b) {
  RowRange rows{0, sequences.rows, sequences.rows};
  if (sequences.cu) {
    const Index begin = sequences.cu[b], end = sequences.cu[b + 1];
    rows.first = begin < 0 ? 0 : begin < sequences.rows ? begin : sequences.rows;
    const Index cut = end < sequences.rows ? end : sequences.rows;
    rows.capacity = cut > rows.first ? cut - rows.first : 0;
  }
  rows.length = rows.capacity < sequences.max_length ? rows.capacity : sequences.max_length;
  if (sequences.used) {
    const Index used = sequences.used[b];
    rows.length = used < 0 ? 0 : used < rows.length ? used : rows.length;
  }
  return rows;
}

// One sequence of a call.
struct SeqInfo {
  RowRange q, k;
};

FLASH3_HOST_DEVICE constexpr SeqInfo seq_info(const Sequences& q, const Sequences& k, Index b) {
  return {rows_of(q, b), rows_of(k, b)};
}

}  // namespace flash3
