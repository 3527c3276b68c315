// SPDX-License-Identifier: Apache-2.0
// Where a ragged batch has rows of no token. Compiled on the host and on the device, as
// seq_info.hpp.
#pragma once

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

}  // namespace flash3
