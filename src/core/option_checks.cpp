// SPDX-License-Identifier: Apache-2.0
#include "core/option_checks.hpp"

#include "core/arithmetic.hpp"
#include "core/message.hpp"

namespace flash3 {
namespace {

// One element for each query head, side by side.
Status check_head_field(const Field& f, const Field& q, Pointers pointers) {
  FLASH3_CHECK(check_sizes(f));
  FLASH3_CHECK(check_same({f, 0}, {q, q.ndim - 2}, "heads_q"));
  FLASH3_CHECK(check_strides(f));
  return check_data(f, pointers);
}

}  // namespace

Status check_index_field(const Field& f, int64_t least, const char* why, Pointers pointers) {
  const flash3_tensor& t = f.tensor;
  if (t.dtype != FLASH3_INT32)
    return invalid_argument(message(f.name, ".dtype = ", static_cast<int32_t>(t.dtype),
                                    " but it must be 4 (int32); ", f.name,
                                    " that is not given is all zero"));
  FLASH3_CHECK(check_sizes(f));
  if (t.shape[0] < least)
    return invalid_argument(
        message(f.part("shape", 0), " = ", t.shape[0], " but it must be at least ", least, why));
  FLASH3_CHECK(check_strides(f));
  return check_data(f, pointers);
}

Status check_sequence_fields(const SequenceFields& fields, Pointers pointers) {
  if (fields.packed())
    FLASH3_CHECK(check_index_field(fields.cu, 1, ", one more than there are sequences", pointers));
  if (fields.has_used()) FLASH3_CHECK(check_index_field(fields.used, 0, "", pointers));
  if (fields.max_length < 0)
    return invalid_argument(message(fields.max_name, " = ", fields.max_length,
                                    " but it must be at least 0 (0: not known)"));
  if (fields.max_length > 0 && !fields.packed() && !fields.paged)
    return invalid_argument(message(fields.max_name, " = ", fields.max_length, " but ",
                                    fields.cu.name, " is all zero; a maximum goes with packed ",
                                    "sequences alone"));
  return {};
}

Status check_used(const SequenceFields& fields, const Extent& batch) {
  return fields.has_used() ? check_same({fields.used, 0}, batch, "batch size") : Status();
}

Status check_sink(const Field& sink, const Field& q, const Field& out, Pointers pointers) {
  const flash3_dtype dtype = sink.tensor.dtype;
  if (dtype != FLASH3_FLOAT32 && dtype != out.tensor.dtype)
    return invalid_argument(message(sink.name, ".dtype = ", static_cast<int32_t>(dtype), " but ",
                                    out.name, ".dtype = ", static_cast<int32_t>(out.tensor.dtype),
                                    "; a sink must be 3 (float32) or have the dtype of out, and ",
                                    "one that is not wanted is all zero"));
  return check_head_field(sink, q, pointers);
}

Status check_dsink(const Field& dsink, const Field& sink, const Field& q, Pointers pointers) {
  if (!is_given(sink.tensor))
    return invalid_argument(message(dsink.name, " is given but ", sink.name,
                                    " is all zero; a gradient needs the sink that it belongs to"));
  if (dsink.tensor.dtype != sink.tensor.dtype)
    return invalid_argument(
        message(dsink.name, ".dtype = ", static_cast<int32_t>(dsink.tensor.dtype), " but ",
                sink.name, ".dtype = ", static_cast<int32_t>(sink.tensor.dtype), "; ", sink.name,
                " and ", dsink.name, " must have the same dtype"));
  return check_head_field(dsink, q, pointers);
}

Status check_lengths_of(const Sequences& s, int64_t batch, const char* cu, const char* used,
                        const char* max_name) {
  for (int64_t b = 0; s.cu && b <= batch; ++b) {
    const int64_t begin = b > 0 ? s.cu[b - 1] : 0, end = s.cu[b];
    if (end < begin && b > 0)
      return invalid_argument(message(cu, "[", b, "] = ", end, " but ", cu, "[", b - 1,
                                      "] = ", begin, "; ", cu, " must not decrease"));
    if (end < 0 || end > s.rows)
      return invalid_argument(message(cu, "[", b, "] = ", end, " but it must be from 0 to ", s.rows,
                                      ", the rows of the packed tensors"));
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t capacity = s.cu ? s.cu[b + 1] - s.cu[b] : s.rows;
    if (s.used && (s.used[b] < 0 || s.used[b] > capacity))
      return invalid_argument(message(used, "[", b, "] = ", s.used[b], " but it must be from 0 to ",
                                      capacity, ", the rows of that sequence"));
    const int64_t length = s.used ? s.used[b] : capacity;
    if (length > s.max_length)
      return invalid_argument(message(max_name, " = ", s.max_length, " but sequence ", b, " has ",
                                      length, " tokens; no sequence may be longer"));
  }
  return {};
}

template <class P>
static Status check_lengths_of_call(const P& p) {
  FLASH3_CHECK(
      check_lengths_of(p.sequences_q, p.batch, "cu_seqlens_q", "seqused_q", "max_seqlen_q"));
  return check_lengths_of(p.sequences_k, p.batch, "cu_seqlens_k", "seqused_k", "max_seqlen_k");
}

Status check_lengths(const Problem& p) {
  FLASH3_CHECK(check_lengths_of_call(p));
  return p.has_cache() ? check_cache_places(p) : Status();
}
Status check_lengths(const QuantizeProblem& p) { return check_lengths_of_call(p); }

namespace {

// [batch, heads, blocks] against the tensor that it belongs to.
Status check_blocks(const Field& scale, const Field& of, const ScaleChecks& checks) {
  const Extent& batch = checks.batch;
  const bool packed = of.ndim == 3;
  const int64_t batches = scale.tensor.shape[0], blocks = scale.tensor.shape[2];
  const Extent seq{of, of.ndim - 3};
  if (packed && batches != 1)
    return invalid_argument(message(scale.part("shape", 0), " = ", batches, " but ", of.name,
                                    " is packed; the scales of its blocks are [1, heads, blocks]"));
  if (checks.elements)
    FLASH3_CHECK(check_same({scale, 0}, {of, 0}, checks.elements));
  else if (!packed)
    FLASH3_CHECK(check_same({scale, 0}, batch, "batch size"));
  FLASH3_CHECK(check_same({scale, 1}, {of, of.ndim - 2}, "heads"));
  const int64_t needed =
      packed ? seq.size() / kScaleBlock + batch.size() : ceil_div(seq.size(), kScaleBlock);
  if (blocks == needed) return {};
  return invalid_argument(message(
      scale.part("shape", 2), " = ", blocks, " but ", seq.name(), " = ", seq.size(),
      packed ? message(" and ", batch.name(), " = ", batch.size(), "; blocks must be ", needed,
                       ", total / ", kScaleBlock, " + batch, rounded down")
             : message("; blocks must be ", needed, checks.elements ? ", rows / " : ", seq / ",
                       kScaleBlock, ", rounded up")));
}

}  // namespace

Field scale_field(const char* name, const flash3_tensor& scale) {
  return {name,
          scale.ndim == 1   ? "[1]"
          : scale.ndim == 2 ? "[batch, heads_k]"
                            : "[batch, heads, blocks]",
          scale.ndim, scale};
}

Status check_scale(const Field& scale, const Field& of, const ScaleChecks& checks) {
  const flash3_tensor& t = scale.tensor;
  if (t.dtype != FLASH3_FLOAT32)
    return invalid_argument(message(scale.name, ".dtype = ", static_cast<int32_t>(t.dtype),
                                    " but it must be 3 (float32)"));
  if (t.ndim < 1 || t.ndim > 3)
    return invalid_argument(message(scale.name, ".ndim = ", t.ndim,
                                    " but it must be 1, [1], 2, [batch, heads_k], or 3, "
                                    "[batch, heads, blocks]"));
  FLASH3_CHECK(check_sizes(scale));
  if (t.ndim == 1 && t.shape[0] != 1)
    return invalid_argument(
        message(scale.part("shape", 0), " = ", t.shape[0],
                " but scales of one dimension must be [1], one for the tensor"));
  if (t.ndim == 2) {
    FLASH3_CHECK(check_same({scale, 0}, checks.batch, "batch size"));
    FLASH3_CHECK(check_same({scale, 1}, checks.heads_k, "heads_k"));
  }
  if (t.ndim == 3) FLASH3_CHECK(check_blocks(scale, of, checks));
  FLASH3_CHECK(check_strides(scale));
  return check_data(scale, checks.pointers);
}

Status check_scale_of(const flash3_tensor& scale, const char* name, const Field& of,
                      const ScaleChecks& checks) {
  if (!is_given(scale)) return {};
  if (!is_fp8(of.tensor))
    return invalid_argument(
        message(name, " is given but ", of.name, ".dtype = ", dtype_name(of.tensor.dtype),
                "; only FP8 tensors have scales, ", "and one that is not given is all zero"));
  return check_scale(scale_field(name, scale), of, checks);
}

ScaleView scale_view(const flash3_tensor& t, Index heads) {
  ScaleView view;
  if (!is_given(t)) return view;
  const auto stride = [&](int d) { return d < t.ndim && t.shape[d] > 1 ? t.stride[d] : 0; };
  view.data = static_cast<float*>(t.data);
  view.kind = t.ndim == 1 ? ScaleKind::kTensor : t.ndim == 2 ? ScaleKind::kHead : ScaleKind::kBlock;
  if (view.kind == ScaleKind::kTensor) return view;
  view.stride_batch = stride(0);
  view.stride_head = stride(1);
  view.stride_block = stride(2);
  if (view.kind == ScaleKind::kHead) view.heads_per_scale = heads > 0 ? heads : 1;
  return view;
}

Status check_rotary_tables(const Field& cos, const Field& sin, const Field& of, const char* whose,
                           Pointers pointers) {
  for (const Field& f : {cos, sin}) {
    FLASH3_CHECK(check_form(f));
    const flash3_dtype dtype = f.tensor.dtype, other = of.tensor.dtype;
    if (dtype != FLASH3_FLOAT32 && dtype != other)
      return invalid_argument(message(f.name, ".dtype = ", dtype_name(dtype), " but ", of.name,
                                      ".dtype = ", dtype_name(other), "; it must be ",
                                      "float32 or the dtype of ", whose));
  }
  FLASH3_CHECK(check_same_dtype({cos, sin}));
  FLASH3_CHECK(check_same_shape(sin, cos));
  const Extent dim{of, of.ndim - 1};
  const int64_t pairs = cos.tensor.shape[1];
  if (pairs < 1 || 2 * pairs > dim.size())
    return invalid_argument(message(cos.part("shape", 1), " = ", pairs, " but ", dim.name(), " = ",
                                    dim.size(), "; it must be from 1 to half of head_dim"));
  for (const Field& f : {cos, sin}) {
    FLASH3_CHECK(check_strides(f));
    FLASH3_CHECK(check_data(f, pointers));
  }
  return {};
}

RotaryView rotary_view(const flash3_tensor& cos, const flash3_tensor& sin, bool interleaved) {
  const auto stride = [](const flash3_tensor& t) { return t.shape[0] > 1 ? t.stride[0] : 0; };
  return {.given = true,
          .cos = cos.data,
          .sin = sin.data,
          .dtype = cos.dtype,
          .interleaved = interleaved,
          .dim = static_cast<int>(2 * cos.shape[1]),
          .positions = cos.shape[0],
          .stride_cos = stride(cos),
          .stride_sin = stride(sin)};
}

namespace {

// Whether q, or k and v, are FP8, or become it.
bool computes_fp8(const flash3_forward_params& p) {
  return is_fp8(p.q) || is_fp8(p.k) || p.compute == FLASH3_COMPUTE_FP8;
}

// Elements from the first one of k to the first one of v; false if not a whole number.
bool distance(const ForwardProblem& p, int64_t* elements) {
  const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.v.data) -
                                          reinterpret_cast<uintptr_t>(p.k.data));
  *elements = bytes / dtype_size(p.kv_dtype);
  return bytes % dtype_size(p.kv_dtype) == 0;
}

bool same_strides(const TensorView& a, const TensorView& b) {
  return a.stride_batch == b.stride_batch && a.stride_seq == b.stride_seq &&
         a.stride_head == b.stride_head;
}

}  // namespace

DimLimits limits_of(flash3_head_dims_of calls) {
  if (calls == FLASH3_HEAD_DIMS_OF_FORWARD) return {kMaxScoreDim, kMaxValueDim};
  return {kMaxHeadDim, kMaxHeadDim};
}

DimLimits forward_limits(const flash3_forward_params& p) {
  return limits_of(computes_fp8(p) ? FLASH3_HEAD_DIMS_OF_FORWARD_FP8 : FLASH3_HEAD_DIMS_OF_FORWARD);
}

Status check_qv(const flash3_forward_params& p, const Field& q, const Field& v, Pointers pointers) {
  if (!is_given(p.qv)) return {};
  const Field qv{
      "qv", q.ndim == 3 ? "[total_q, heads_q, head_dim_v]" : "[batch, seq_q, heads_q, head_dim_v]",
      q.ndim, p.qv};
  if (computes_fp8(p))
    return unsupported(message("qv is given but ",
                               p.compute == FLASH3_COMPUTE_FP8 ? "compute = 1 (fp8)"
                               : is_fp8(p.q)                   ? "q.dtype = float8_e4m3"
                                                               : "k.dtype = float8_e4m3",
                               "; with qv nothing may be FP8"));
  FLASH3_CHECK(check_form(qv));
  FLASH3_CHECK(check_same_dtype({q, qv}));
  for (int d = 0; d < q.ndim - 1; ++d)
    FLASH3_CHECK(check_same({qv, d}, {q, d},
                            d == q.ndim - 2             ? "heads_q"
                            : d == q.ndim - 3 && d == 0 ? "total_q"
                            : d == 0                    ? "batch size"
                                                        : "seq_q"));
  const Extent dim{q, q.ndim - 1}, dim_v{v, v.ndim - 1};
  FLASH3_CHECK(check_same({qv, q.ndim - 1}, dim_v, "head_dim_v"));
  if (dim.size() + dim_v.size() > kMaxScoreDim)
    return invalid_argument(message(dim.name(), " = ", dim.size(), " and ", dim_v.name(), " = ",
                                    dim_v.size(), " but with qv head_dim + head_dim_v must be at ",
                                    "most ", kMaxScoreDim));
  FLASH3_CHECK(check_strides(qv));
  return check_data(qv, pointers);
}

Status check_values_in_keys(const Field& k, const Field& v) {
  if (is_fp8(k.tensor))
    return unsupported(
        message("k_new is given but v_new is not, and k.dtype = ", dtype_name(k.tensor.dtype),
                "; an FP8 cache has values of its own, which v_new gives"));
  const Extent dim{k, k.ndim - 1}, dim_v{v, v.ndim - 1};
  if (dim_v.size() <= dim.size()) return {};
  return invalid_argument(message("k_new is given but v_new is not; keys are appended with their ",
                                  "values, unless v is a part of k, but ", dim_v.name(), " = ",
                                  dim_v.size(), " and ", dim.name(), " = ", dim.size()));
}

Status check_shared_rows(const ForwardProblem& p) {
  if (!p.append.given || p.append.has_v || !p.k.data || !p.v.data) return {};
  int64_t first = 0;
  const bool whole = distance(p, &first), even = whole && same_strides(p.k, p.v);
  if (!even || first < 0 || first + p.head_dim_v > p.head_dim)
    return invalid_argument(
        "k_new is given but v_new is not; keys are appended with their values, unless v is a part "
        "of the rows of k, with the same strides");
  if (!p.append.rotary.given || first >= p.append.rotary.dim) return {};
  return invalid_argument(message("rotary_cos.shape[1] = ", p.append.rotary.dim / 2,
                                  " but v begins at element ", first,
                                  " of the rows of k, and v_new is not given; the values must not ",
                                  "get the embedding of the keys"));
}

namespace {

using Params = flash3_forward_params;

bool is_packed(const Params& p) { return is_given(p.cu_seqlens_q); }

Status check_form_of(const Field& tree, const Field& q, bool packed) {
  const flash3_tensor& t = tree.tensor;
  if (t.dtype != FLASH3_INT64)
    return invalid_argument(message("tree_mask.dtype = ", static_cast<int32_t>(t.dtype),
                                    " but it must be 6 (int64); tree_mask that is not given is ",
                                    "all zero"));
  FLASH3_CHECK(check_sizes(tree));
  if (packed) {
    FLASH3_CHECK(check_same({tree, 0}, {q, 0}, "total_q"));
  } else {
    FLASH3_CHECK(check_same({tree, 0}, {q, 0}, "batch size"));
    FLASH3_CHECK(check_same({tree, 1}, {q, 1}, "seq_q"));
  }
  return check_strides(tree);
}

// A word has a bit for each query of its sequence.
Status check_queries(const Params& p, const Field& q) {
  const bool packed = is_packed(p);
  const int64_t most = packed ? p.max_seqlen_q : q.tensor.shape[1];
  if (most <= kMostDrafts && (most > 0 || !packed)) return {};
  return invalid_argument(message(packed ? "max_seqlen_q" : q.part("shape", 1), " = ", most,
                                  " but it must be ", packed ? "from 1 to " : "at most ",
                                  kMostDrafts,
                                  " with tree_mask, which has a bit for each query of a sequence"));
}

// tree_mask is the whole mask, and knows no positions.
Status check_company(const Params& p) {
  const auto without = [](const char* name, int64_t value) {
    return invalid_argument(message("tree_mask is given and ", name, " = ", value,
                                    "; tree_mask is the mask of the call"));
  };
  if (p.causal != 0) return without("causal", p.causal);
  if (p.window != 0) return without("window", p.window);
  if (p.chunk != 0) return without("chunk", p.chunk);
  if (is_given(p.rotary_cos))
    return invalid_argument(
        "tree_mask is given and rotary_cos is given; drafts of one depth have one position, which "
        "the call does not know: embed q and k_new before it");
  if (p.compute == FLASH3_COMPUTE_FP8)
    return unsupported(
        "tree_mask is given but compute = 1 (fp8); drafts are verified in the dtype of q, k and v");
  return {};
}

}  // namespace

Status check_tree(const Params& p, const Field& q, Pointers pointers) {
  if (!is_given(p.tree_mask)) return {};
  const bool packed = is_packed(p);
  const Field tree{"tree_mask", packed ? "[total_q]" : "[batch, seq_q]", packed ? 1 : 2,
                   p.tree_mask};
  FLASH3_CHECK(check_form_of(tree, q, packed));
  FLASH3_CHECK(check_queries(p, q));
  FLASH3_CHECK(check_company(p));
  return check_data(tree, pointers);
}

TreeMask tree_mask(const Params& p) {
  const flash3_tensor& t = p.tree_mask;
  if (!is_given(t)) return {};
  const bool has_batches = !is_packed(p) && t.shape[0] > 1;
  return {true, static_cast<const uint64_t*>(t.data), has_batches ? t.stride[0] : 0};
}

}  // namespace flash3
