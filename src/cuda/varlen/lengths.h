// SPDX-License-Identifier: Apache-2.0
// The rows of a sequence, as kernels read them. Host and device.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda {

// Where the sequences lie: core/seq_info.hpp and core/kv_cache.hpp in 32 bits.
struct SequenceLengths {
  const int* cu;    // or null
  const int* used;  // or null
  int rows, max_length;
};

struct SequenceRows {
  int first, length, capacity;
};

FLASH3_HOST_DEVICE constexpr SequenceRows rows_of(const SequenceLengths& lengths, int b) {
  SequenceRows rows{0, 0, lengths.rows};
  if (lengths.cu != nullptr) {
    rows.first = clamped(lengths.cu[b], 0, lengths.rows);
    rows.capacity = clamped(lengths.cu[b + 1], rows.first, lengths.rows) - rows.first;
  }
  rows.length = clamped(rows.capacity, 0, lengths.max_length);
  if (lengths.used != nullptr) rows.length = clamped(lengths.used[b], 0, rows.length);
  return rows;
}

}  // namespace flash3::cuda
