// SPDX-License-Identifier: Apache-2.0
// The sequences of a case, and the generator that draws their lengths: Steele and Vigna's
// SplitMix64, which is a line in other languages too.
#pragma once

#include <cstdint>
#include <vector>

#include "cases/case.hpp"
#include "cases/internals.hpp"

namespace flash3::cases {

// A bijection that makes random bits of a counter.
inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline uint64_t next_bits(uint64_t* state) {
  const uint64_t bits = mix(*state);
  *state += 0x9E3779B97F4A7C15;
  return bits;
}

// The sequences of a case: how long each is, and where it lies in the tensors.

// The rows of q's tensors, or of k's.
struct SequenceLengths {
  std::vector<int32_t> cu, used;  // cu_seqlens and seqused; empty: not given
  int64_t rows = 0;               // of the tensor, for one batch element or packed
  int64_t max_length = 0;

  Sequences view() const;
};

struct CaseSequences {
  SequenceLengths q, k;
  SeqInfo operator[](int64_t b) const { return seq_info(q.view(), k.view(), b); }
};

// A function of the case's seed, or of its draw. Where seq_q = seq_k, each sequence has as many
// keys as queries, but of mixed ones.
CaseSequences make_sequences(const Case& c);

// Long-tailed lengths, at least 1, with this sum: log-normal with the median tokens / 128 and a
// standard deviation of 1.2 of the logarithm; the last is cut to the sum.
// bench/gpu/ragged_points.py draws the same.
std::vector<int64_t> log_normal_lengths(int64_t tokens, int64_t draw);

// What a row of a tensor is to a call.
enum class RowUse : char {
  kCounts,   // a token
  kUnused,   // after the tokens of its sequence that count
  kOutside,  // of no sequence
};

// The use of each row, [batch, seq] or [total].
std::vector<RowUse> row_uses(const SequenceLengths& rows, int64_t batch);

}  // namespace flash3::cases
