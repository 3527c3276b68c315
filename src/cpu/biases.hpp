// SPDX-License-Identifier: Apache-2.0
// What is added to the scores of a row after scale and softcap: ALiBi, a bias by distance and one
// by pair.
#pragma once

#include <limits>

#include "core/convert.hpp"
#include "cpu/sequence.hpp"

namespace flash3::cpu {

inline bool has_biases(const Problem& p) {
  return p.alibi_slopes.data || p.bias.data || p.bias_table.data;
}

// Of one row, and the keys of its sequence from a first one on, from which they are counted.
struct RowBias {
  float slope = 0;               // of ALiBi
  Index from_diagonal = 0;       // j − i' of the first key
  const float* table = nullptr;  // the entry of distance 0; null: none
  Index distance = 0;            // of its last entry
  const void* pairs = nullptr;   // the element of the first key; null: none
  flash3_dtype dtype = FLASH3_DTYPE_NONE;
  Index stride = 0;

  float of_table(Index key) const {
    return table[std::clamp(from_diagonal + key, -distance, distance)];
  }
  float of_pair(Index key) const { return load_float(pairs, dtype, key * stride); }

  // Whether it is −∞.
  bool hides(Index key) const {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    return (table && of_table(key) == kHidden) || (pairs && of_pair(key) == kHidden);
  }
};

inline const void* element_at(const BiasView& t, Index offset) {
  return static_cast<const char*>(t.data) + offset * dtype_size(t.dtype);
}

inline RowBias row_bias(const Problem& p, const Sequence& s, Index query, Index head, Index first) {
  RowBias bias;
  bias.slope = p.alibi_slopes.at(s.batch, head);
  bias.from_diagonal = first - (query + s.mask.row_shift);
  if (const BiasTableView& t = p.bias_table; t.data) {
    bias.distance = t.distance;
    bias.table = t.data + head * t.stride_head + t.distance;
  }
  if (const BiasView& t = p.bias; t.data) {
    bias.dtype = t.dtype, bias.stride = t.stride_key;
    bias.pairs = element_at(t, t.offset(s.batch, head, s.q.first + query) + first * t.stride_key);
  }
  return bias;
}

}  // namespace flash3::cpu
