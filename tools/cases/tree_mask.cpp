// SPDX-License-Identifier: Apache-2.0
#include "cases/tree_mask.hpp"

#include "cases/split_mix.hpp"

namespace flash3::cases {
namespace {

uint64_t bit(int64_t i) { return i < 64 ? uint64_t{1} << i : 0; }

// The words of a sequence's drafts; what they show after the last draft counts for nothing.
void draw_tree(int64_t drafts, uint64_t* state, uint64_t* words) {
  const uint64_t after = drafts < 64 ? ~uint64_t{0} << drafts : 0;
  for (int64_t i = 0; i < drafts; ++i) {
    const uint64_t draw = next_bits(state);
    const auto parent = static_cast<int64_t>(draw % static_cast<uint64_t>(i + 1)) - 1;
    words[i] = bit(i) | (parent < 0 ? 0 : words[parent] & ~after);
    if (draw >> 60 == 0) words[i] = next_bits(state);
    if (draw >> 60 == 1) words[i] = 0;
    words[i] |= next_bits(state) & after;
  }
}

}  // namespace

flash3_tensor tree_mask_view(const Case& c, const CaseSequences& sequences) {
  const int64_t rows = sequences.q.rows;
  if (c.packed_q) return {nullptr, FLASH3_INT64, 1, {rows, 0, 0, 0}, {1, 0, 0, 0}};
  return {nullptr, FLASH3_INT64, 2, {c.batch, rows, 0, 0}, {rows, 1, 0, 0}};
}

GuardedTensor make_tree_mask(const Case& c, const CaseSequences& sequences) {
  GuardedTensor made = guard(tree_mask_view(c, sequences), 0);
  auto* const words = static_cast<uint64_t*>(made.view.data);
  uint64_t state = mix(c.seed + 7000);
  for (int64_t b = 0; b < c.batch; ++b) {
    const RowRange q = rows_of(sequences.q.view(), b);
    draw_tree(q.length, &state, words + (c.packed_q ? 0 : b * sequences.q.rows) + q.first);
  }
  return made;
}

}  // namespace flash3::cases
