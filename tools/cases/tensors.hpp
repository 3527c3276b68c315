// SPDX-License-Identifier: Apache-2.0
// Guarded tensors and their contents. A tensor lies between two guard regions; guards and the gaps
// that its strides leave hold a fill pattern (all bits one: a NaN in every dtype). A kernel that
// reads there computes NaN, one that writes there is caught, and an output starts with it too, so
// that an element never written shows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "cases/sequences.hpp"
#include "oracle/mask_pairs.hpp"

namespace flash3::cases {

// Host bytes with a tensor inside; view.data points into bytes.
struct GuardedTensor {
  std::vector<std::byte> bytes;
  size_t offset = 0;  // of view.data
  flash3_tensor view{};
  std::vector<Range> forbidden;  // elements of the view that must not be read or written either

  // The same view in a copy of bytes that lives at base.
  flash3_tensor at(void* base) const;
  // Every byte as it was before anything was written.
  void fill_pattern();
  void fill_forbidden();
  // Which gap, guard or forbidden byte has changed since it was filled, in words; "" if none has.
  std::string damage() const;
};

// A tensor with this view, which lies so many elements from an aligned address; all of it holds the
// pattern.
GuardedTensor guard(flash3_tensor view, int64_t offset);

// A copy whose view points into the copy.
GuardedTensor clone(const GuardedTensor& tensor);

GuardedTensor make_tensor(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t heads,
                          int64_t dim, Layout layout);
GuardedTensor make_lse(int64_t batch, int64_t heads, int64_t seq, Layout layout);
GuardedTensor make_vector(flash3_dtype dtype, int64_t size);

// The tensors of a case, packed or not: [batch, seq, heads, dim] or [total, heads, dim], and
// [batch, heads_q, seq_q] or [heads_q, total].
GuardedTensor make_rows(const Case& c, TensorName name, const SequenceLengths& rows, int64_t heads,
                        int64_t dim, flash3_dtype dtype);
// Scales of a tensor with these rows and heads, as the case has them; empty if it has none.
GuardedTensor make_scales(const Case& c, TensorName name, const SequenceLengths& rows,
                          int64_t heads);
GuardedTensor make_lse(const Case& c, TensorName name, const SequenceLengths& rows);
// The same without memory, and one of a dimension.
flash3_tensor rows_lse_view(const Case& c, TensorName name, const SequenceLengths& rows);
flash3_tensor vector_view(flash3_dtype dtype, int64_t size);

// Forbids the rows that are of one of these uses, and fills them, unless rows share memory.
// is_lse: rows are the last dimension.
void forbid_rows(GuardedTensor* tensor, const SequenceLengths& rows, int64_t batch,
                 std::initializer_list<RowUse> uses, bool is_lse = false);

int64_t element_size(flash3_dtype dtype);

// Elements from the first to just after the last one, gaps included.
int64_t span_of(const flash3_tensor& t);

// Calls row(offset in elements) for each run of the last dimension, in the order in which a
// contiguous tensor has them.
template <class Row>
void for_each_row(const flash3_tensor& t, Row row) {
  int64_t size[3] = {1, 1, 1}, stride[3] = {};
  for (int i = 0; i < t.ndim - 1 && i < 3; ++i) size[i] = t.shape[i], stride[i] = t.stride[i];
  for (int64_t a = 0; a < size[0]; ++a)
    for (int64_t b = 0; b < size[1]; ++b)
      for (int64_t c = 0; c < size[2]; ++c) row(a * stride[0] + b * stride[1] + c * stride[2]);
}

// Fills all elements (numbered in [batch, seq, heads, dim] order, so that the layout does not
// change the values) with N(0, 1) or outliers; value i depends on seed and i alone.
void fill_random(const flash3_tensor& t, Distribution distribution, uint64_t seed);

// Value i of the standard normal sequence named by seed.
float normal_value(uint64_t seed, uint64_t i);

// count values of N(0, 1) as dtype, on all cores: input for benchmarks.
void fill_normal(void* data, flash3_dtype dtype, int64_t count, uint64_t seed);

// What else a call may have, a T each; all zero or empty: not given.
template <class T>
struct Extra {
  T sink{}, cu_seqlens_q{}, cu_seqlens_k{}, seqused_q{}, seqused_k{};
  T q_scale{}, k_scale{}, v_scale{};  // any, not powers of two alone
  T qv{}, tree_mask{};
  std::array<T, count_added_tensors()> added{};  // those of added_fields(), in their order

  // Calls visit(field, T&) for each of one Extra, or visit(field, T&, U&) for those of two.
  template <class Visit, class... Extras>
  static void visit(const Visit& visit, Extras&... all) {
    const auto known = [&](std::string_view name, auto&... of) {
      visit(*find_field<flash3_forward_params>(name), of...);
    };
    known("sink", all.sink...);
    known("cu_seqlens_q", all.cu_seqlens_q...), known("cu_seqlens_k", all.cu_seqlens_k...);
    known("seqused_q", all.seqused_q...), known("seqused_k", all.seqused_k...);
    known("q_scale", all.q_scale...), known("k_scale", all.k_scale...);
    known("v_scale", all.v_scale...);
    known("qv", all.qv...), known("tree_mask", all.tree_mask...);
    size_t i = 0;
    for (const ParamField& field : added_fields<flash3_forward_params>())
      if (field.kind == FieldKind::kTensor) visit(field, all.added[i]...), ++i;
  }
};
struct ExtraViews : Extra<flash3_tensor> {
  const flash3_mask* mask = nullptr;
};
struct HostMask;  // mask.hpp
struct ExtraTensors : Extra<GuardedTensor> {
  std::shared_ptr<const HostMask> mask;
  ExtraViews views() const;
  // What an oracle takes; null: the case has no mask of this kind.
  const MaskPairs* mask_pairs() const;
};
ExtraTensors clone(const ExtraTensors& tensors);

// Those that the params of a call have.
template <class Params>
ExtraViews extra_of(const Params& p) {
  ExtraViews views;
  ExtraViews::visit(
      [&](const ParamField& field, flash3_tensor& view) {
        if (const ParamField* own = find_field<Params>(field.name))
          view = own->template get<flash3_tensor>(&p);
      },
      views);
  if constexpr (requires { p.mask; }) views.mask = p.mask;
  return views;
}
template <class Params>
void set_extra(const ExtraViews& views, Params* p) {
  ExtraViews::visit(
      [&](const ParamField& field, const flash3_tensor& view) {
        if (const ParamField* own = find_field<Params>(field.name)) *own->tensor(p) = view;
      },
      views);
  if constexpr (requires { p->mask; }) p->mask = views.mask;
}

// Fills scales with values that are no powers of two, from this number of a sequence on; returns
// the next.
uint64_t fill_scales(const Case& c, uint64_t first, const flash3_tensor& scales);

// A sink near the log of the number of keys, so that it matters beside the scores; of three heads
// or more, one is −∞.
ExtraTensors make_extra_tensors(const Case& c, const CaseSequences& sequences);

// v is empty where it is a part of k, and lse if it is not wanted.
struct ForwardTensors {
  GuardedTensor q, k, v, out, lse;
  ExtraTensors extra;
};

// Inputs filled after the case's seed and distribution, outputs with the fill pattern. In ragged
// batches rows of no token that counts are forbidden.
ForwardTensors make_forward_tensors(const Case& c);

// The view of v: the one given, or of a latent case a part of k.
flash3_tensor view_of_v(const Case& c, const flash3_tensor& k, const flash3_tensor& v);

// The call on these views, without workspace, stream or backend.
flash3_forward_params make_params(const Case& c, const flash3_tensor& q, const flash3_tensor& k,
                                  const flash3_tensor& v, const flash3_tensor& out,
                                  const flash3_tensor& lse, const ExtraViews& extra = {});

// The options and extra tensors of a case, forward or backward.
template <class Params>
void set_options(const Case& c, const ExtraViews& extra, Params* p) {
  p->softmax_scale = c.softmax_scale;
  p->causal = c.causal;
  p->window = c.window;
  p->window_left = c.window_left;
  p->window_right = c.window_right;
  p->softcap = c.softcap;
  p->chunk = c.chunk;
  p->dropout_p = c.dropout;
  set_extra(extra, p);
  if constexpr (requires { p->compute; }) {
    p->compute = c.fp8 ? FLASH3_COMPUTE_FP8 : FLASH3_COMPUTE_AS_GIVEN;
    p->rotation_seed = c.seed;
    p->fp8_sums = c.sums;
    p->rotate = c.rotate;
  }
  c.added.set(p);
  if (c.dropout > 0 && p->dropout_seed == 0) p->dropout_seed = c.seed;
  p->fill_padding = c.fill;
  p->max_seqlen_q = c.packed_q && c.max_known ? c.seq_q : 0;
  p->max_seqlen_k = c.packed_k && c.max_known ? c.seq_k : 0;
}

// The same without data, for questions.
flash3_forward_params make_question(const Case& c);

}  // namespace flash3::cases
