// SPDX-License-Identifier: Apache-2.0
// Masks as data by the words of flash3/mask.h: which pairs are seen, from the source's tensors and
// the band, and never from the lists that are checked against it. Host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "flash3/mask.h"
#include "oracle/one_sequence.hpp"

namespace flash3 {

// The tokens that count of one sequence: rows first, first + 1, … of tensors [batch, seq, …] or
// [total, …]. rows: how many there are where no length says it.
struct Tokens {
  int64_t first, count;
};
Tokens tokens_of(const flash3_tensor& cu_seqlens, const flash3_tensor& seqused, int64_t b,
                 int64_t rows);

// A byte for each pair: [batch, heads, seq_q, seq_k], with 1 in place of what all share. A sequence
// that is shorter has its pairs in the first rows and columns.
struct MaskPairs {
  int64_t batch = 0, heads = 0, seq_q = 0, seq_k = 0;
  std::vector<uint8_t> seen;

  // [seq_q, seq_k]
  const uint8_t* of(int64_t b, int64_t h) const {
    const int64_t pair = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h);
    return seen.data() + pair * seq_q * seq_k;
  }

  // What a query of sequence b and head h sees, where that is what it sees without the mask.
  VisibleKeys of(VisibleKeys visible, int64_t b, int64_t h) const {
    visible.pairs = of(b, h), visible.pairs_row = seq_k;
    return visible;
  }
};

// The pairs of one sequence, for oracles that take one after the other.
class PairsOfSequence {
 public:
  // all: null where the call has no mask.
  PairsOfSequence(const MaskPairs* all, int64_t b) : given_(all != nullptr) {
    if (!given_) return;
    const int64_t size = all->heads * all->seq_q * all->seq_k;
    own_ = {1, all->heads, all->seq_q, all->seq_k, {all->of(b, 0), all->of(b, 0) + size}};
  }
  const MaskPairs* get() const { return given_ ? &own_ : nullptr; }

 private:
  const bool given_;
  MaskPairs own_;
};

// The params must be valid.
MaskPairs mask_pairs(const flash3_mask_params& params);

// The mask of a call, from its source: both are given or null, else std::invalid_argument.
class CallMask {
 public:
  CallMask(const flash3_mask* mask, const flash3_mask_params* source);

  // As MaskPairs has it; without a mask what is visible.
  VisibleKeys of(const VisibleKeys& visible, int64_t b, int64_t h) const {
    return given_ ? pairs_.of(visible, b, h) : visible;
  }

 private:
  const bool given_;
  MaskPairs pairs_;
};

}  // namespace flash3
