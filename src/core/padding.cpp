// SPDX-License-Identifier: Apache-2.0
#include "core/padding.hpp"

#include <bit>
#include <limits>

namespace flash3 {
namespace {

// Tensors without memory or without packed or unused rows have none to fill.
void add(const TensorView& view, const Sequences& sequences, int element_bytes, uint32_t bits,
         Padding* padding) {
  if (!view.data || !(sequences.packed || sequences.has_used)) return;
  padding->tensors[padding->count++] = {view, sequences, element_bytes, bits};
}

// A float32 of each row and head, which becomes −∞.
void add_rows(const ForwardProblem& p, const LseView& rows, Padding* padding) {
  TensorView view = p.out;
  view.data = rows.data;
  view.dim = view.stride_seq = 1;
  view.stride_batch = rows.stride_batch;
  view.stride_head = rows.stride_head;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  add(view, p.sequences_q, sizeof(float), std::bit_cast<uint32_t>(kNothing), padding);
}

}  // namespace

Padding padding_of(const ForwardProblem& p) {
  Padding padding = p.max_logits.of_heads ? Padding{} : padding_of_max_logits(p);
  padding.batch = p.batch;
  add(p.out, p.sequences_q, dtype_size(p.out_dtype), 0, &padding);
  add_rows(p, p.lse, &padding);
  return padding;
}

Padding padding_of_max_logits(const ForwardProblem& p) {
  Padding padding;
  padding.batch = p.batch;
  add_rows(p, p.max_logits, &padding);
  return padding;
}

Padding padding_of(const BackwardProblem& p) {
  Padding padding;
  padding.batch = p.batch;
  const auto add_gradient = [&](const TensorView& view, Sequences sequences) {
    sequences.has_used = false;
    sequences.used = nullptr;
    sequences.max_length = sequences.rows;
    add(view, sequences, dtype_size(p.gradient_dtype), 0, &padding);
  };
  add_gradient(p.dq, p.sequences_q);
  add_gradient(p.dk, p.sequences_k);
  add_gradient(p.dv, p.sequences_k);
  return padding;
}

}  // namespace flash3
