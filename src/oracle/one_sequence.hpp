// SPDX-License-Identifier: Apache-2.0
// One sequence of a call: its mask, and views of its rows; and the sequences of a call on a cache,
// gathered.
//
// The mask is as flash3.h defines it, pair by pair. The oracles and the yardsticks take it from
// here and not from core/mask.hpp, which is a part of what they check.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/added_checks.hpp"
#include "core/problem.hpp"

namespace flash3 {

// [begin, end), of keys or of queries.
struct IndexRange {
  int64_t begin = 0, end = 0;
  bool empty() const { return begin >= end; }
  int64_t size() const { return empty() ? 0 : end - begin; }
};

// The mask of one sequence.
struct VisibleKeys {
  int64_t seq_q = 0, seq_k = 0;
  int64_t window_left = -1, window_right = -1;  // negative: unbounded
  int64_t chunk = 0;                            // 0: none
  const uint64_t* tree = nullptr;               // a word for each query, or none
  bool top_left = false;                        // where the diagonal begins
  const uint8_t* pairs = nullptr;  // a byte for each, [seq_q, pairs_row], that says all; or none
  int64_t pairs_row = 0;

  // What the params of a call say.
  template <class Params>
  static VisibleKeys of(const Params& p, int64_t seq_q, int64_t seq_k) {
    VisibleKeys mask{.seq_q = seq_q, .seq_k = seq_k, .chunk = p.chunk};
    if (p.window) mask.window_left = p.window_left, mask.window_right = p.window_right;
    // causal = 1 adds j ≤ i', and a window reaches at least to there.
    if (p.causal) mask.window_right = 0;
    mask.top_left = p.mask_alignment == 1;
    return mask;
  }
  // What a problem's rule says (core/mask.hpp).
  template <class Rule>
  static VisibleKeys of_rule(const Rule& rule, int64_t seq_q, int64_t seq_k) {
    return {.seq_q = seq_q,
            .seq_k = seq_k,
            .window_left = rule.window_left,
            .window_right = rule.window_right,
            .chunk = rule.chunk,
            .top_left = rule.top_left};
  }

  // i' of query i.
  int64_t diagonal_of(int64_t i) const { return top_left ? i : i + seq_k - seq_q; }

  // Whether query i sees key j.
  bool sees(int64_t i, int64_t j) const {
    if (pairs) return pairs[i * pairs_row + j] != 0;
    const int64_t diagonal = diagonal_of(i);
    // A window may be as wide as int64_t, so nothing is added to it.
    if (window_left >= 0 && diagonal - j > window_left) return false;
    if (window_right >= 0 && j - diagonal > window_right) return false;
    if (const int64_t bit = j - (seq_k - seq_q); tree && bit >= 0 && (tree[i] >> bit & 1) == 0)
      return false;
    return chunk == 0 || floor_div(j, chunk) == floor_div(diagonal, chunk);
  }

  // The least range that holds what query i sees. Every bound is one; a tree leaves some out, and
  // so may pairs.
  IndexRange keys(int64_t i) const {
    IndexRange seen{0, seq_k};
    while (!seen.empty() && !sees(i, seen.begin)) ++seen.begin;
    while (!seen.empty() && !sees(i, seen.end - 1)) --seen.end;
    return seen;
  }
  // Calls what(range) for the ranges that make up what query i sees.
  template <class What>
  void for_each_range(int64_t i, const What& what) const {
    const IndexRange all = keys(i);
    int64_t begin = all.begin;
    for (int64_t j = first_hole(all); j < all.end; ++j)
      if (!sees(i, j)) {
        if (begin < j) what(IndexRange{begin, j});
        begin = j + 1;
      }
    if (begin < all.end) what(IndexRange{begin, all.end});
  }
  // Calls what(key) for the keys inside keys(i) that query i does not see.
  template <class What>
  void for_each_hidden(int64_t i, const What& what) const {
    if (!tree && !pairs) return;
    const IndexRange all = keys(i);
    for (int64_t j = first_hole(all); j < all.end; ++j)
      if (!sees(i, j)) what(j);
  }
  // The least range that holds what queries [first, end) see.
  IndexRange keys(int64_t first, int64_t end) const {
    IndexRange all{seq_k, 0};
    for (int64_t i = first; i < end; ++i)
      if (const IndexRange seen = keys(i); !seen.empty())
        all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
    return all.empty() ? IndexRange{} : all;
  }

 private:
  // No key of keys(i) before this one is hidden.
  int64_t first_hole(const IndexRange& all) const {
    if (pairs) return all.begin;
    return tree ? std::clamp(seq_k - seq_q, all.begin, all.end) : all.end;
  }
  static int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -1 - (-1 - a) / b; }
};

// One sequence of a ragged batch as a call of its own: batch 1, its lengths, and views of its rows.
// For the oracles, which then know nothing of ragged batches. Host memory.

inline TensorView one_sequence(TensorView t, flash3_dtype dtype, int64_t b, const RowRange& rows) {
  const int64_t element = dtype_size(dtype);
  if (t.data)
    t.data = static_cast<std::byte*>(t.data) +
             (b * t.stride_batch + rows.first * t.stride_seq) * element;
  t.batch = 1, t.seq = rows.length, t.stride_batch = 0;
  return t;
}

inline LseView one_sequence(LseView t, int64_t b, const RowRange& rows) {
  if (t.data) t.data += b * t.stride_batch + rows.first;
  t.stride_batch = 0;
  return t;
}

inline ScaleView one_sequence(ScaleView t, const Sequences& sequences, int64_t b,
                              const RowRange& rows) {
  if (t.data) t.data += t.offset(b, 0, scale_block(sequences, rows, b, 0));
  t.stride_batch = 0;
  return t;
}

inline StateView one_sequence(StateView t, int64_t, const RowRange&) { return t; }

inline HeadsView one_sequence(HeadsView t, int64_t b, const RowRange&) {
  if (t.data) t.data += b * t.stride_batch;
  t.stride_batch = 0;
  return t;
}

inline BiasView one_sequence(BiasView t, int64_t b, const RowRange& rows) {
  if (t.data)
    t.data =
        static_cast<std::byte*>(t.data) + t.offset(b, 0, rows.first) * int64_t{dtype_size(t.dtype)};
  t.stride_batch = 0;
  return t;
}
inline BiasTableView one_sequence(BiasTableView t, int64_t, const RowRange&) { return t; }

// The tensors that flash3.h has gained; an element for all rows of a head is not of one sequence.
template <class P>
void narrow_added(int64_t b, const RowRange& rows, P* p) {
  for_each_added(*p, [&](const ParamField&, auto, auto& view) {
    if constexpr (requires { view.of_heads; })
      if (view.of_heads) return;
    view = one_sequence(view, b, rows);
  });
}

inline void narrow_to(int64_t b, const SeqInfo& s, Problem* p) {
  p->batch = 1;
  p->dropout.first_sequence += b;
  p->seq_q = s.q.length, p->seq_k = s.k.length;
  p->sequences_q = {.rows = s.q.length, .max_length = s.q.length};
  p->sequences_k = {.rows = s.k.length, .max_length = s.k.length};
  p->q = one_sequence(p->q, p->dtype, b, s.q);
  p->qv = one_sequence(p->qv, p->dtype, b, s.q);
  p->k = one_sequence(p->k, p->kv_dtype, b, s.k);
  p->v = one_sequence(p->v, p->kv_dtype, b, s.k);
  p->out = one_sequence(p->out, p->out_dtype, b, s.q);
  p->lse = one_sequence(p->lse, b, s.q);
}

inline ForwardProblem one_sequence(ForwardProblem p, int64_t b) {
  const SeqInfo s = p.sequence(b);
  p.q_scale = one_sequence(p.q_scale, p.sequences_q, b, s.q);
  p.k_scale = one_sequence(p.k_scale, p.sequences_k, b, s.k);
  p.v_scale = one_sequence(p.v_scale, p.sequences_k, b, s.k);
  p.tree = {p.tree.given, p.tree.of(b, s.q), 0};
  narrow_added(b, s.q, &p);
  narrow_to(b, s, &p);
  return p;
}

// Without its dsink, which is a sum over all sequences.
inline BackwardProblem one_sequence(BackwardProblem p, int64_t b) {
  const SeqInfo s = p.sequence(b);
  narrow_to(b, s, &p);
  p.dout = one_sequence(p.dout, p.dtype, b, s.q);
  p.dlse = one_sequence(p.dlse, b, s.q);
  p.dq = one_sequence(p.dq, p.gradient_dtype, b, s.q);
  p.dk = one_sequence(p.dk, p.gradient_dtype, b, s.k);
  p.dv = one_sequence(p.dv, p.gradient_dtype, b, s.k);
  p.dsink = {};
  narrow_added(b, s.q, &p);
  return p;
}

// Row i of sequence b in a contiguous tensor with the rows of q (or of k), packed or not.
inline int64_t row_in_batch(const Sequences& s, int64_t b, int64_t i) {
  return (s.packed ? 0 : b * s.rows) + rows_of(s, b).first + i;
}

// All rows of such a tensor.
inline int64_t rows_in_batch(const Sequences& s, int64_t batch) {
  return s.packed ? s.rows : batch * s.rows;
}

// A call on a KV cache as one without: keys and values gathered from the cache and from what is
// appended, and q with its rotary embedding and rotation. For the oracles, which then know nothing
// of caches; tests/cpp/cpu/definition_test.cpp holds it against the definition. Host memory.

class GatheredCache {
 public:
  explicit GatheredCache(const ForwardProblem& problem);
  GatheredCache(const GatheredCache&) = delete;
  GatheredCache& operator=(const GatheredCache&) = delete;

  // [batch, the most keys, heads_k, dim] with a length for each sequence; of a call without a
  // cache, which may rotate q, the keys that it has.
  const ForwardProblem& problem() const { return made_; }

 private:
  void gather_keys(const ForwardProblem& problem);
  void transform_q(const ForwardProblem& problem);

  ForwardProblem made_;
  std::vector<std::byte> q_, k_, v_;
  std::vector<float> k_scales_, v_scales_;
  std::vector<int> lengths_;
};

// Writes what the call appends into the problem's k and v, as flash3_forward does first.
void append_ref(const ForwardProblem& problem);

}  // namespace flash3
