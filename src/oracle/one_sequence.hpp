// SPDX-License-Identifier: Apache-2.0
// One sequence of a ragged batch as a call of its own: batch 1, its lengths, and views of its rows.
// For the oracles, which then know nothing of ragged batches. Host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/added_checks.hpp"
#include "core/problem.hpp"

namespace flash3 {

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

inline HeadsView one_sequence(HeadsView t, int64_t b, const RowRange&) {
  if (t.data) t.data += b * t.stride_batch;
  t.stride_batch = 0;
  return t;
}

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

}  // namespace flash3
