// SPDX-License-Identifier: Apache-2.0
// Masks as data by the words of flash3/mask.h: which pairs are seen, from the source's tensors and
// the band, and never from the lists that are checked against it. Host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "flash3/mask.h"
#include "oracle/one_sequence.hpp"

namespace flash3 {

// A byte for each pair: [batch, heads, seq_q, seq_k], with 1 in place of what all share.
struct MaskPairs {
  int64_t batch = 0, heads = 0, seq_q = 0, seq_k = 0;
  std::vector<uint8_t> seen;

  // [seq_q, seq_k]
  const uint8_t* of(int64_t b, int64_t h) const {
    const int64_t pair = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h);
    return seen.data() + pair * seq_q * seq_k;
  }
};

// The params must be valid.
MaskPairs mask_pairs(const flash3_mask_params& params);

// The mask of a call, from its source: both are given or null, else std::invalid_argument.
class CallMask {
 public:
  CallMask(const flash3_mask* mask, const flash3_mask_params* source);

  // What a query of sequence b and head h sees, where that is what it sees without the mask.
  VisibleKeys of(VisibleKeys visible, int64_t b, int64_t h) const {
    if (given_) visible.pairs = pairs_.of(b, h);
    return visible;
  }

 private:
  const bool given_;
  MaskPairs pairs_;
};

}  // namespace flash3
