// SPDX-License-Identifier: Apache-2.0
// The one place where user input is checked: params of the C interface in, a problem out.
#include "core/problem.hpp"

#include <algorithm>
#include <cmath>

#include "core/added_checks.hpp"
#include "core/alias_checks.hpp"
#include "core/mask_checks.hpp"
#include "core/message.hpp"
#include "core/option_checks.hpp"
#include "core/params.hpp"

namespace flash3 {
namespace {

// Within these, what float32 makes of the two is exact but for rounding: softmax_scale · log2 e and
// softcap · log2 e are normal, their quotient lies from 1e-36 to 1e36, and so does its inverse, of
// normal numbers from 1.2e-38 to 3.4e38. Scores of float16 tensors, at most 576 · 65504² = 2.5e12
// times the scale, stay finite too, with or without a cap. What else overflows comes from the data.
constexpr float kLeastFactor = 1e-18f, kMostFactor = 1e18f;

// softmax_scale or softcap, of which 0 stands for `none`.
Status check_factor(const char* name, float value, const char* none) {
  if (value == 0.f || (value >= kLeastFactor && value <= kMostFactor)) return {};
  return invalid_argument(message(name, " = ", value, " but it must be 0 (", none, ") or from ",
                                  kLeastFactor, " to ", kMostFactor));
}

template <class Params>
Status check_dropout(const Params& p) {
  FLASH3_CHECK(check_dropout_p(p.dropout_p));
  if constexpr (std::same_as<Params, flash3_forward_params>) {
    if (p.dropout_p == 0.f) return {};
    const auto refuse = [&](auto... what) {
      return invalid_argument(message("dropout_p = ", p.dropout_p, " and ", what...,
                                      "; dropout excludes FP8, qv and tree_mask"));
    };
    for (const Field& f : {Field{"q", "", 4, p.q}, Field{"k", "", 4, p.k}})
      if (is_fp8(f.tensor)) return refuse(f.name, ".dtype = ", dtype_name(f.tensor.dtype));
    if (p.compute == FLASH3_COMPUTE_FP8) return refuse("compute = 1 (fp8)");
    if (is_given(p.qv)) return refuse("qv is given");
    if (is_given(p.tree_mask)) return refuse("tree_mask is given");
  }
  return {};
}

template <class Params>
Status check_options(const Params& p) {
  FLASH3_CHECK(check_factor("softmax_scale", p.softmax_scale, "1/sqrt(head_dim)"));
  FLASH3_CHECK(check_context(p));
  FLASH3_CHECK(check_factor("softcap", p.softcap, "none"));
  FLASH3_CHECK(check_dropout(p));
  FLASH3_CHECK(check_band(p));
  if constexpr (requires { p.tree_mask; })
    if (is_given(p.tree_mask) && p.mask_alignment != FLASH3_ALIGN_BOTTOM_RIGHT)
      return invalid_argument(message("mask_alignment = ", p.mask_alignment, " and tree_mask is ",
                                      "given; a tree's queries are those of the last keys"));
  return {};
}

// What both kinds of call say of q, k, v and out, once each by itself is in form: how they agree
// with each other, with the sequences and with the sink.
template <class Params>
Status check_agreement(const Params& p, const Field& q, const Field& k, const Field& v,
                       const Field& out, Pointers pointers) {
  const SequenceFields sequences_q = sequences_of_q(p), sequences_k = sequences_of_k(p);
  const Extent batch_q = batch_of(q, sequences_q), batch_k = batch_of(k, sequences_k);
  if constexpr (std::same_as<Params, flash3_forward_params>)
    FLASH3_CHECK(check_cache_shapes(p, q, k, v, out, batch_q, batch_k));
  else
    FLASH3_CHECK(
        check_shapes(q, k, v, out, batch_q, batch_k, limits_of(FLASH3_HEAD_DIMS_OF_BACKWARD)));
  FLASH3_CHECK(check_used(sequences_q, batch_q));
  FLASH3_CHECK(check_used(sequences_k, batch_q));
  return is_given(p.sink) ? check_sink({"sink", "[heads_q]", 1, p.sink}, q, out, pointers)
                          : Status();
}

template <class Params>
Status check_sequences(const Params& p, Pointers pointers, Layout* layout) {
  FLASH3_CHECK(check_sequence_fields(sequences_of_q(p), pointers));
  FLASH3_CHECK(check_sequence_fields(sequences_of_k(p), pointers));
  *layout = {is_given(p.cu_seqlens_q), is_given(p.cu_seqlens_k)};
  return {};
}

// Whether a result of 16-bit tensors is asked for as it is before it is rounded to their dtype.
bool is_unrounded(const Field& result, const Field& q) {
  return result.tensor.dtype == FLASH3_FLOAT32 && dtype_size(q.tensor.dtype) == 2;
}

// FP8 keys and values under a q of 16 bits, which tells out's dtype.
Status check_dtypes_of_16_bit_q(const Field& q, const Field& k, const Field& v, const Field& out) {
  FLASH3_CHECK(check_same_dtype({k, v}));
  if (dtype_size(q.tensor.dtype) != 2)
    return invalid_argument(message(
        "q.dtype = ", dtype_name(q.tensor.dtype), " but k.dtype = ", dtype_name(k.tensor.dtype),
        "; FP8 keys and values need ", "a q of float16, bfloat16 or float8_e4m3"));
  return is_unrounded(out, q) ? Status() : check_same_dtype({q, out});
}

// What the dtypes of q, k and v, compute, and out's dtype say of each other.
Status check_dtypes(const flash3_forward_params& p, const Field& q, const Field& k, const Field& v,
                    const Field& out) {
  if (p.compute != FLASH3_COMPUTE_AS_GIVEN && p.compute != FLASH3_COMPUTE_FP8)
    return invalid_argument(
        message("compute = ", p.compute, " but it must be 0 (the dtype of q) or 1 (fp8)"));
  for (const Field& f : {q, k})
    if (is_fp8(f.tensor) && p.compute == FLASH3_COMPUTE_FP8)
      return invalid_argument(message("compute = 1 (fp8) but ", f.name,
                                      ".dtype = ", dtype_name(f.tensor.dtype),
                                      "; it is for q, k and v that ", "the call converts to FP8"));
  if (p.fp8_sums < FLASH3_FP8_SUMS_AUTO || p.fp8_sums > FLASH3_FP8_SUMS_TWO_LEVELS)
    return invalid_argument(message("fp8_sums = ", p.fp8_sums,
                                    " but it must be 0 (auto), 1 (one level) or 2 (two levels)"));
  if (p.fp8_sums != FLASH3_FP8_SUMS_AUTO && !is_fp8(p.q) && p.compute != FLASH3_COMPUTE_FP8)
    return invalid_argument(message("fp8_sums = ", p.fp8_sums, " but q.dtype = ",
                                    dtype_name(q.tensor.dtype), " and compute = 0; sums of FP8 ",
                                    "products are those of an FP8 q, or of compute = 1 (fp8)"));
  if (!is_fp8(p.q) && is_fp8(p.k)) return check_dtypes_of_16_bit_q(q, k, v, out);
  if (!is_fp8(p.q) && p.compute == FLASH3_COMPUTE_AS_GIVEN && !is_unrounded(out, q))
    return check_same_dtype({q, k, v, out});
  return check_same_dtype({q, k, v});
}

Status check_scales(const flash3_forward_params& p, const Field& q, const Field& k, const Field& v,
                    Pointers pointers) {
  const SequenceFields sequences = sequences_of_q(p);
  ScaleChecks checks{batch_of(q, sequences), {k, k.ndim - 2}, pointers};
  FLASH3_CHECK(check_scale_of(p.q_scale, "q_scale", q, checks));
  // Blocks are of rows, not of keys: pages and elements of a cache have their own.
  if (is_given(p.page_table)) checks.elements = "number of pages";
  if (is_given(p.cache_batch_idx)) checks.elements = "number of elements";
  FLASH3_CHECK(check_scale_of(p.k_scale, "k_scale", k, checks));
  return check_scale_of(p.v_scale, "v_scale", v, checks);
}

Status check_tensors(const flash3_forward_params& p, Pointers pointers) {
  Layout layout;
  FLASH3_CHECK(check_sequences(p, pointers, &layout));
  FLASH3_CHECK(check_cache_fields(p, pointers));
  if (is_given(p.page_table)) layout.k_words = "[pages, page_size, heads_k, head_dim]";
  if (is_given(p.page_table)) layout.v_words = "[pages, page_size, heads_k, head_dim_v]";
  if (is_given(p.page_table)) layout.k_packed_by = nullptr;
  const Field q = layout.q("q", p.q), k = layout.k("k", p.k), v = layout.v("v", p.v);
  const Field out = layout.out("out", p.out), lse = layout.lse("lse", p.lse);

  for (const Field& f : {q, k, v}) FLASH3_CHECK(check_form(f, Dtypes::kFloatOrFp8));
  FLASH3_CHECK(check_form(out));
  FLASH3_CHECK(check_dtypes(p, q, k, v, out));
  FLASH3_CHECK(check_cache_dtypes(p));
  FLASH3_CHECK(check_agreement(p, q, k, v, out, pointers));
  FLASH3_CHECK(check_scales(p, q, k, v, pointers));
  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_strides(f));
  FLASH3_CHECK(check_no_overlap(out));
  FLASH3_CHECK(check_qv(p, q, v, pointers));
  FLASH3_CHECK(check_append(p, q, k, v, pointers));
  FLASH3_CHECK(check_rotation(p, q));
  FLASH3_CHECK(check_tree(p, q, pointers));
  FLASH3_CHECK(check_added(p, q, layout, pointers));
  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_data(f, pointers));

  if (!is_given(p.lse)) return {};
  FLASH3_CHECK(check_rows(lse, q, "; an lse that is not wanted is all zero"));
  FLASH3_CHECK(check_no_overlap(lse));
  return check_data(lse, pointers);
}

Status check_tensors(const flash3_backward_params& p, Pointers pointers) {
  Layout layout;
  FLASH3_CHECK(check_sequences(p, pointers, &layout));
  const Field q = layout.q("q", p.q), k = layout.k("k", p.k), v = layout.v("v", p.v);
  const Field out = layout.out("out", p.out), dout = layout.out("dout", p.dout);
  const Field dq = layout.q("dq", p.dq), dk = layout.k("dk", p.dk), dv = layout.v("dv", p.dv);
  const Field lse = layout.lse("lse", p.lse), dlse = layout.lse("dlse", p.dlse);
  const auto all = {q, k, v, out, dout, dq, dk, dv};

  for (const Field& f : {q, k, v}) {
    FLASH3_CHECK(check_form(f, Dtypes::kFloatOrFp8));
    if (is_fp8(f.tensor))
      return unsupported(message(f.name, ".dtype = ", dtype_name(f.tensor.dtype),
                                 " but there is no FP8 backward; it takes the float16, bfloat16 or "
                                 "float32 tensors from which the FP8 ones were made"));
  }
  for (const Field& f : {out, dout, dq, dk, dv}) FLASH3_CHECK(check_form(f));
  if (is_unrounded(dq, q)) {
    FLASH3_CHECK(check_same_dtype({q, k, v, out, dout}));
    FLASH3_CHECK(check_same_dtype({dq, dk, dv}));
  } else {
    FLASH3_CHECK(check_same_dtype(all));
  }
  FLASH3_CHECK(check_agreement(p, q, k, v, out, pointers));
  FLASH3_CHECK(check_same_shape(dout, out));
  FLASH3_CHECK(check_same_shape(dq, q));
  FLASH3_CHECK(check_same_shape(dk, k));
  FLASH3_CHECK(check_same_shape(dv, v));
  FLASH3_CHECK(check_added(p, q, layout, pointers));
  for (const Field& f : all) FLASH3_CHECK(check_strides(f));
  for (const Field& f : {dq, dk, dv}) FLASH3_CHECK(check_no_overlap(f));
  for (const Field& f : all) FLASH3_CHECK(check_data(f, pointers));

  if (!is_given(p.lse))
    return invalid_argument(message("lse is all zero; the backward needs the lse, ", lse.layout,
                                    ", that the forward has written"));
  FLASH3_CHECK(check_rows(lse, q, ""));
  FLASH3_CHECK(check_data(lse, pointers));
  if (is_given(p.dlse)) {
    FLASH3_CHECK(check_rows(dlse, q, "; a dlse that is not given is all zero"));
    FLASH3_CHECK(check_data(dlse, pointers));
  }
  if (!is_given(p.dsink)) return {};
  return check_dsink({"dsink", "[heads_q]", 1, p.dsink}, {"sink", "[heads_q]", 1, p.sink}, q,
                     pointers);
}

// The views of a call whose sequences are known.
TensorView view_q(const Problem& p, const flash3_tensor& t) {
  return p.sequences_q.packed ? packed_view(t, p.batch, p.seq_q) : view(t);
}
TensorView view_k(const Problem& p, const flash3_tensor& t) {
  return p.sequences_k.packed ? packed_view(t, p.batch, p.seq_k) : view(t);
}
LseView view_lse(const Problem& p, const flash3_tensor& t) {
  return p.sequences_q.packed ? packed_lse_view(t) : lse_view(t);
}

// The fields that forward and backward have.
template <class Params>
void fill(const Params& p, Problem* problem) {
  problem->dtype = p.q.dtype;
  problem->kv_dtype = p.k.dtype;
  problem->out_dtype = p.out.dtype;
  problem->sequences_q = sequences(p.q, sequences_of_q(p));
  problem->sequences_k = sequences(p.k, sequences_of_k(p));
  if constexpr (std::same_as<Params, flash3_forward_params>) fill_pages(p, problem);
  problem->batch = problem->sequences_q.packed ? p.cu_seqlens_q.shape[0] - 1 : p.q.shape[0];
  problem->seq_q = problem->sequences_q.max_length;
  problem->seq_k = problem->sequences_k.max_length;
  problem->q = view_q(*problem, p.q);
  problem->k = view_k(*problem, p.k);
  problem->v = view_k(*problem, p.v);
  problem->out = view_q(*problem, p.out);
  problem->lse = view_lse(*problem, p.lse);
  problem->heads_q = problem->q.heads;
  problem->heads_k = problem->k.heads;
  problem->head_dim = static_cast<int>(problem->q.dim);
  problem->head_dim_v = static_cast<int>(problem->v.dim);
  if constexpr (std::same_as<Params, flash3_forward_params>)
    if (is_given(p.qv)) problem->qv = view_q(*problem, p.qv);
  problem->softmax_scale = p.softmax_scale > 0.f
                               ? p.softmax_scale
                               : static_cast<float>(1.0 / std::sqrt(double(problem->score_dim())));
  problem->softcap = p.softcap;
  problem->dropout = {dropout_threshold(p.dropout_p), p.dropout_seed, p.dropout_offset};
  problem->sink = sink_view(p.sink);
  problem->mask_rule = mask_rule_of(p);
  fill_context(p, problem);
}

}  // namespace

template <class Params>
MaskRule mask_rule_of(const Params& p) {
  MaskRule rule;
  if (p.window) rule.window_left = p.window_left, rule.window_right = p.window_right;
  // causal is window_right = 0, the narrowest bound that a window can have on that side.
  if (p.causal) rule.window_right = 0;
  rule.chunk = std::min(p.chunk, kMaxSize);  // no sequence is longer
  rule.top_left = p.mask_alignment == FLASH3_ALIGN_TOP_LEFT;
  return rule;
}
template MaskRule mask_rule_of(const flash3_forward_params& p);
template MaskRule mask_rule_of(const flash3_backward_params& p);
template MaskRule mask_rule_of(const flash3_mask_params& p);

Status make_forward_problem(const flash3_forward_params* params, Pointers pointers,
                            ForwardProblem* problem) {
  WholeParams<flash3_forward_params> whole;
  FLASH3_CHECK(whole.read(params));
  const auto& p = *whole;
  FLASH3_CHECK(check_tensors(p, pointers));
  FLASH3_CHECK(check_options(p));
  FLASH3_CHECK(check_flag("fill_padding", p.fill_padding));
  FLASH3_CHECK(check_cache_options(p));
  *problem = {};
  fill(p, problem);
  fill_append(p, problem);
  FLASH3_CHECK(take_mask(p, problem));
  FLASH3_CHECK(check_shared_rows(*problem));
  problem->tree = tree_mask(p);
  problem->sm_margin = p.sm_margin;
  problem->schedule = p.schedule;
  problem->fp8_sums = static_cast<flash3_fp8_sums>(p.fp8_sums);
  problem->q_scale = scale_view(p.q_scale, problem->queries_per_kv_head());
  problem->k_scale = scale_view(p.k_scale, 1);
  problem->v_scale = scale_view(p.v_scale, 1);
  problem->quantizes = p.compute == FLASH3_COMPUTE_FP8;
  problem->rotates = p.rotate != 0;
  problem->fills_padding =
      p.fill_padding != 0 && (problem->sequences_q.packed || problem->sequences_q.has_used);
  fill_added(p, problem);
  problem->rotation_seed = p.rotation_seed;
  return check_aliases(p, *problem);
}

Status make_backward_problem(const flash3_backward_params* params, Pointers pointers,
                             BackwardProblem* problem) {
  WholeParams<flash3_backward_params> whole;
  FLASH3_CHECK(whole.read(params));
  const auto& p = *whole;
  FLASH3_CHECK(check_tensors(p, pointers));
  FLASH3_CHECK(check_options(p));
  FLASH3_CHECK(check_flag("deterministic", p.deterministic));
  FLASH3_CHECK(check_flag("fill_padding", p.fill_padding));
  *problem = {};
  fill(p, problem);
  FLASH3_CHECK(take_mask(p, problem));
  problem->gradient_dtype = p.dq.dtype;
  problem->dout = view_q(*problem, p.dout);
  problem->dlse = view_lse(*problem, p.dlse);
  problem->dq = view_q(*problem, p.dq);
  problem->dk = view_k(*problem, p.dk);
  problem->dv = view_k(*problem, p.dv);
  problem->dsink = sink_view(p.dsink);
  fill_added(p, problem);
  problem->deterministic = p.deterministic != 0;
  // Where tensors are not packed, gradients of unused tokens are written all the same.
  problem->fills_padding =
      p.fill_padding != 0 && (problem->sequences_q.packed || problem->sequences_k.packed);
  return check_aliases(p, *problem);
}

const char* dtype_name(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_DTYPE_NONE: return "none";
    case FLASH3_FLOAT16: return "float16";
    case FLASH3_BFLOAT16: return "bfloat16";
    case FLASH3_FLOAT32: return "float32";
    case FLASH3_INT32: return "int32";
    case FLASH3_FLOAT8_E4M3: return "float8_e4m3";
    case FLASH3_INT64: return "int64";
    case FLASH3_UINT8: return "uint8";
  }
  return "unknown";
}

}  // namespace flash3
