// SPDX-License-Identifier: Apache-2.0
// What kernels know of a sequence: its mask and, of a ragged batch, its rows. Integers only, host
// and device.
#pragma once

#include "core/mask.hpp"

namespace flash3::cuda {

// Rows, keys, the mask's bounds and their sums are 32-bit in the kernels.
inline constexpr int kMaxLength = 1 << 30;
static_assert(kMaxLength <= BandOf<int>::kUnbounded);
// Any size that kernels count in 32 bits is at most this, so that a tile fits after it.
inline constexpr int kMostCounted = kMaxLength - 256;
FLASH3_HOST_DEVICE constexpr int clamped(int x, int least, int most) {
  return x < least ? least : x < most ? x : most;
}

using TileMask = MaskOf<int>;
using TileMaskRule = NarrowMaskRuleOf<int>;

// The keys that a row sees: [first, end), also outside the tensor.
struct RowKeys {
  int first, end;
};

// What a query of a sequence with seq_k keys sees; mask: the sequence's.
template <bool kBand>
FLASH3_HOST_DEVICE constexpr RowKeys keys_of_row(const TileMask& mask, int seq_k, int row) {
  if constexpr (!kBand) return {0, seq_k};
  const int first = mask.first(row), end = mask.end(row);
  return {first, seq_k < end ? seq_k : end};
}

// The sequences of a ragged batch are listed by a small kernel (varlen/varlen_schedule.cu) before
// the kernels that compute on them, which read no length themselves.

// One sequence: its rows in the tensors of queries and of keys, and its tiles.
struct ListedSequence {
  int batch;
  int q_first, q_length;  // from its first row of a packed tensor, else 0
  int k_first, k_length;
  int k_capacity;        // k_length and the unused rows behind them
  int tiles;             // of each group of heads
  int groups_at_a_time;  // groups of heads whose tiles run at the same time
};

// Null pointers: all sequences have one length, and nothing is listed.
struct SequenceList {
  const ListedSequence* rows;
  // [count + 1] tiles of the sequences before; the last is the number of all. Null: not cut into
  // tiles.
  const int* first_tile;
  int count;
};

}  // namespace flash3::cuda
