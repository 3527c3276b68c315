// SPDX-License-Identifier: Apache-2.0
// What scores get by their place, and which weights are dropped: what kernels are told of it. Plain
// data, host and device.
#pragma once

#include "core/dropout.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda {

// Null pointers: there is none of it. Strides are in elements, and 0 where one element serves all.
struct ScoreBias {
  // ALiBi's: [batch, heads_q].
  const float* slopes;
  long long slopes_batch, slopes_head;

  // By the distance j − i', cut to ±reach: [heads_q, 2·reach + 1].
  const float* table;
  long long table_head;
  int reach;

  // Of each query and key: [batch, heads_q, rows, keys].
  const void* pairs;
  FloatType type;
  long long pairs_batch, pairs_head, pairs_row, pairs_key;

  bool capped;  // by the kernel's softcap before
};

// See core/dropout.hpp.
struct DroppedWeights {
  unsigned threshold;               // 0: none is dropped
  float scale;                      // of those that are kept
  const unsigned long long* state;  // seed and offset on the device; null: these
  unsigned long long seed, offset;
  unsigned first_head;  // the number of the call's first sequence's first query head
};

struct BiasParams {
  ScoreBias bias;
  DroppedWeights dropped;
  int heads_q;
  // What terms are multiplied by to be added to scores in the kernel's unit; and, in kernels that
  // take any terms, what brings raw scores, or what the softcap makes of them, to base 2.
  float unit, scale_log2;
};

}  // namespace flash3::cuda
