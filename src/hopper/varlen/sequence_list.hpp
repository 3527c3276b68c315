// SPDX-License-Identifier: Apache-2.0
// The sequences of a ragged batch as a small kernel lists them (varlen/varlen_schedule.cu) before
// the kernels that compute on them, which read no length themselves. Integers only, host and
// device.
#pragma once

#include "core/host_device.hpp"

namespace flash3::hopper {

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

}  // namespace flash3::hopper
