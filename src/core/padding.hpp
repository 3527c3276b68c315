// SPDX-License-Identifier: Apache-2.0
// Rows of no token, which a call may be asked to fill (fill_padding): where a ragged batch has
// them, compiled on the host and on the device, as seq_info.hpp, and a description that every
// backend understands, made of a forward or backward problem.
#pragma once

#include <concepts>
#include <cstdint>

#include "core/problem.hpp"
#include "core/seq_info.hpp"

namespace flash3 {

// Rows of a tensor that belong to no token, [begin, end) of one batch element.
struct RowGap {
  Index element = 0, begin = 0, end = 0;
};

// How many gaps there may be: one before each packed sequence and one after the last; one after
// each that is not packed.
FLASH3_HOST_DEVICE constexpr Index gap_count(const Sequences& sequences, Index batch) {
  return sequences.packed ? batch + 1 : batch;
}

FLASH3_HOST_DEVICE constexpr RowGap row_gap(const Sequences& sequences, Index batch, Index gap) {
  if (!sequences.packed) return {gap, rows_of(sequences, gap).length, sequences.rows};
  RowGap rows{0, 0, sequences.rows};
  if (gap > 0) {
    const RowRange before = rows_of(sequences, gap - 1);
    rows.begin = before.first + before.length;
  }
  if (gap < batch) rows.end = rows_of(sequences, gap).first;
  return rows;
}

// A tensor, and what its rows of no token become.
struct PaddedTensor {
  TensorView view;  // of an LSE, with dim 1 and its rows side by side
  Sequences sequences;
  int element_bytes = 0;
  uint32_t bits = 0;  // of every element; other than 0 only where an element has four bytes
};

inline constexpr int kMostPadded = 3;

struct Padding {
  PaddedTensor tensors[kMostPadded];
  int count = 0;
  int64_t batch = 0;
};

template <class P>
concept HasPadding = std::same_as<P, ForwardProblem> || std::same_as<P, BackwardProblem>;

// out becomes 0, and lse and max_logits −∞, as a query's that sees no key.
Padding padding_of(const ForwardProblem& problem);

// The rows of max_logits alone.
Padding padding_of_max_logits(const ForwardProblem& problem);

// dq, dk and dv become 0. Those of unused tokens of a sequence are 0 already.
Padding padding_of(const BackwardProblem& problem);

}  // namespace flash3
