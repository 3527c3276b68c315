// SPDX-License-Identifier: Apache-2.0
// Where the input of flash3_quantize and flash3_merge is checked: params of the C interface in, a
// problem out.
#include <algorithm>

#include "core/alias_checks.hpp"
#include "core/message.hpp"
#include "core/option_checks.hpp"
#include "core/params.hpp"
#include "core/problem.hpp"

namespace flash3 {
namespace {

// One of q, k and v with what belongs to it.
struct Part {
  Field in, out;
  const char* scale_name;
  const flash3_tensor& scale;
  SequenceFields sequences;

  bool given() const { return is_given(in.tensor); }
  Extent batch() const { return batch_of(in, sequences); }
  Extent heads() const { return {in, in.ndim - 2}; }
  Extent dim() const { return {in, in.ndim - 1}; }
};

struct Parts {
  Part q, k, v;
};

Parts parts_of(const flash3_quantize_params& p) {
  const Layout layout{is_given(p.cu_seqlens_q), is_given(p.cu_seqlens_k)};
  return {
      {layout.q("q", p.q), layout.q("q_out", p.q_out), "q_scale", p.q_scale, sequences_of_q(p)},
      {layout.k("k", p.k), layout.k("k_out", p.k_out), "k_scale", p.k_scale, sequences_of_k(p)},
      {layout.v("v", p.v), layout.v("v_out", p.v_out), "v_scale", p.v_scale, sequences_of_k(p)}};
}

Status check_absent(const Part& part) {
  for (const auto& [name, tensor] :
       {std::pair<const char*, const flash3_tensor&>{part.out.name, part.out.tensor},
        {part.scale_name, part.scale}})
    if (is_given(tensor))
      return invalid_argument(message(name, " is given but ", part.in.name,
                                      " is all zero; a tensor that is left out has no results"));
  return {};
}

// A part by itself.
Status check_part(const Part& part) {
  if (!part.given()) return check_absent(part);
  FLASH3_CHECK(check_form(part.in));
  FLASH3_CHECK(check_form(part.out, Dtypes::kFp8));
  FLASH3_CHECK(check_same_shape(part.out, part.in));
  const int64_t dim = part.dim().size();
  if (dim < 1 || dim > kMaxHeadDim)
    return invalid_argument(
        message(part.dim().name(), " = ", dim, " but a head dim must be from 1 to ", kMaxHeadDim));
  if (!is_given(part.scale))
    return invalid_argument(message(part.scale_name, " is all zero; it must be a float32 tensor ",
                                    "[1], [batch, heads_k] or [batch, heads, blocks]"));
  return {};
}

// The parts' sizes against each other's.
Status check_parts(const Parts& parts) {
  const auto& [q, k, v] = parts;
  if (!q.given() && !k.given() && !v.given())
    return invalid_argument("q, k and v are all zero; at least one of them must be given");
  for (const Part* part : {&q, &k, &v}) FLASH3_CHECK(check_part(*part));

  const Part* first = nullptr;
  for (const Part* part : {&q, &k, &v}) {
    if (!part->given()) continue;
    if (!first) first = part;
    FLASH3_CHECK(check_same_dtype({first->in, part->in}));
    FLASH3_CHECK(check_same(part->batch(), first->batch(), "batch size"));
    FLASH3_CHECK(check_used(part->sequences, part->batch()));
  }
  if (k.given() && v.given()) {
    FLASH3_CHECK(check_same({v.in, v.in.ndim - 3}, {k.in, k.in.ndim - 3},
                            k.sequences.packed() ? "total_k" : "seq_k"));
    FLASH3_CHECK(check_same(v.heads(), k.heads(), "heads_k"));
  }
  if (q.given() && k.given()) FLASH3_CHECK(check_same(k.dim(), q.dim(), "head_dim"));
  for (const Part* part : {&q, &k, &v}) {
    if (!part->given()) continue;
    if (part->batch().size() * part->heads().size() > kMaxSize)  // both are below 2^31
      return invalid_argument(message(part->batch().name(), " = ", part->batch().size(), " and ",
                                      part->heads().name(), " = ", part->heads().size(),
                                      "; batch * heads must be at most ", kMaxSize));
  }
  return {};
}

// Where the number of KV heads stands: k or v tells it, or what shares q's scales.
Extent heads_k_of(const Parts& parts, const Field& q_scale) {
  if (parts.k.given()) return parts.k.heads();
  if (parts.v.given()) return parts.v.heads();
  return {q_scale, 1};
}

bool has_head_scales(const Part& part) { return part.given() && part.scale.ndim == 2; }

Status check_memory_of(const Part& part, const Extent& heads_k, Pointers pointers) {
  if (!part.given()) return {};
  const Field scale = scale_field(part.scale_name, part.scale);
  FLASH3_CHECK(check_scale(scale, part.in, {part.batch(), heads_k, pointers}));
  for (const Field& f : {part.in, part.out}) {
    FLASH3_CHECK(check_strides(f));
    FLASH3_CHECK(check_data(f, pointers));
  }
  FLASH3_CHECK(check_no_overlap(part.out));
  return check_no_overlap(scale);
}

Status check_group(const Parts& parts, const Extent& heads_k) {
  const Extent heads_q = parts.q.heads();
  if (!parts.q.given() || (!parts.k.given() && !parts.v.given() && !has_head_scales(parts.q)))
    return {};
  const int64_t q = heads_q.size(), k = heads_k.size();
  if (k == 0 ? q == 0 : q % k == 0) return {};
  return invalid_argument(message(heads_q.name(), " = ", q, " but ", heads_k.name(), " = ", k,
                                  "; heads_q must be a multiple of heads_k"));
}

// ---- the rotary embedding ----

Status check_reach(const Part& part, const Field& cos, const char* offset_name, int64_t offset) {
  if (!part.given()) return {};
  if (offset < 0)
    return invalid_argument(message(offset_name, " = ", offset, " but it must be at least 0"));
  const int64_t longest = sequences(part.in.tensor, part.sequences).max_length;
  const int64_t positions = cos.tensor.shape[0];
  if (longest == 0 || offset <= positions - longest) return {};
  return invalid_argument(message(cos.part("shape", 0), " = ", positions, " but ", offset_name,
                                  " = ", offset, " and a sequence of ", part.in.name, " can have ",
                                  longest, " tokens; the tables must reach the last of them"));
}

Status check_rotary(const flash3_quantize_params& p, const Parts& parts, Pointers pointers) {
  FLASH3_CHECK(check_flag("rotary_interleaved", p.rotary_interleaved));
  if (!is_given(p.rotary_cos) && !is_given(p.rotary_sin)) return {};
  const Part& first = parts.q.given() ? parts.q : parts.k;
  if (!first.given())
    return invalid_argument(
        "rotary_cos is given but q and k are all zero; there is nothing to apply it to");
  const Field cos = rotary_field("rotary_cos", p.rotary_cos);
  FLASH3_CHECK(check_rotary_tables(cos, rotary_field("rotary_sin", p.rotary_sin), first.in,
                                   "q and k", pointers));
  FLASH3_CHECK(check_reach(parts.q, cos, "rotary_offset_q", p.rotary_offset_q));
  return check_reach(parts.k, cos, "rotary_offset_k", p.rotary_offset_k);
}

QuantizePart made_of(const Part& part, int64_t batch, Index heads_per_scale) {
  if (!part.given()) return {};
  const Sequences s = sequences(part.in.tensor, part.sequences);
  const auto view_of = [&](const flash3_tensor& t) {
    return s.packed ? packed_view(t, batch, s.max_length) : view(t);
  };
  return {true, view_of(part.in.tensor), view_of(part.out.tensor),
          scale_view(part.scale, heads_per_scale)};
}

}  // namespace

Status make_quantize_problem(const flash3_quantize_params* params, Pointers pointers,
                             QuantizeProblem* problem) {
  WholeParams<flash3_quantize_params> whole;
  FLASH3_CHECK(whole.read(params));
  const auto& p = *whole;
  const Parts parts = parts_of(p);
  const auto& [q, k, v] = parts;
  const bool has_q = q.given(), has_k = k.given() || v.given();
  if (has_q) FLASH3_CHECK(check_sequence_fields(q.sequences, pointers));
  if (has_k) FLASH3_CHECK(check_sequence_fields(k.sequences, pointers));
  FLASH3_CHECK(check_parts(parts));
  const Field q_scale = scale_field("q_scale", p.q_scale);
  const Extent heads_k = heads_k_of(parts, q_scale);
  for (const Part* part : {&q, &k, &v}) FLASH3_CHECK(check_memory_of(*part, heads_k, pointers));
  FLASH3_CHECK(check_group(parts, heads_k));
  FLASH3_CHECK(check_flag("rotate", p.rotate));
  FLASH3_CHECK(check_rotary(p, parts, pointers));
  FLASH3_CHECK(check_context(p));

  QuantizeProblem made;
  const Part& first = has_q ? q : k.given() ? k : v;
  made.dtype = first.in.tensor.dtype;
  made.batch = first.batch().size();
  if (has_q) made.sequences_q = sequences(p.q, q.sequences);
  if (has_k) made.sequences_k = sequences(k.given() ? p.k : p.v, k.sequences);
  const Index kv_heads = has_head_scales(q) ? heads_k.size() : 0;
  made.q = made_of(q, made.batch, kv_heads > 0 ? q.heads().size() / kv_heads : 1);
  made.k = made_of(k, made.batch, 1);
  made.v = made_of(v, made.batch, 1);
  made.rotates = p.rotate != 0;
  made.rotation_seed = p.rotation_seed;
  if (is_given(p.rotary_cos))
    made.rotary = rotary_view(p.rotary_cos, p.rotary_sin, p.rotary_interleaved != 0);
  made.rotary_offset_q = p.rotary_offset_q;
  made.rotary_offset_k = p.rotary_offset_k;
  fill_context(p, &made);
  *problem = made;
  return check_aliases(p, made);
}

namespace {

// Where the input of flash3_merge is checked: params of the C interface in, a problem out.

struct Fields {
  Field out_parts, lse_parts, out, lse, sink;
};

Fields fields_of(const flash3_merge_params& p) {
  return {{"out_parts", "[parts, rows, heads, head_dim_v]", 4, p.out_parts},
          {"lse_parts", "[parts, heads, rows]", 3, p.lse_parts},
          {"out", "[rows, heads, head_dim_v]", 3, p.out},
          {"lse", "[heads, rows]", 2, p.lse},
          {"sink", "[heads]", 1, p.sink}};
}

Status check_float32(const Field& f, const char* advice) {
  if (!is_given(f.tensor)) return check_form(f);  // which says so
  if (f.tensor.dtype != FLASH3_FLOAT32)
    return invalid_argument(message(f.name, ".dtype = ", static_cast<int32_t>(f.tensor.dtype),
                                    " but it must be 3 (float32)", advice));
  return check_form(f);
}

Status check_shapes(const Fields& f) {
  const Extent parts{f.out_parts, 0}, rows{f.out_parts, 1}, heads{f.out_parts, 2};
  const Extent dim{f.out_parts, 3};
  FLASH3_CHECK(check_same({f.lse_parts, 0}, parts, "number of parts"));
  FLASH3_CHECK(check_same({f.lse_parts, 1}, heads, "heads"));
  FLASH3_CHECK(check_same({f.lse_parts, 2}, rows, "rows"));
  FLASH3_CHECK(check_same({f.out, 0}, rows, "rows"));
  FLASH3_CHECK(check_same({f.out, 1}, heads, "heads"));
  FLASH3_CHECK(check_same({f.out, 2}, dim, "head_dim_v"));
  if (dim.size() < 1 || dim.size() > kMaxMergedDim)
    return invalid_argument(message(dim.name(), " = ", dim.size(),
                                    " but head_dim_v must be from 1 to ", kMaxMergedDim));
  if (rows.size() * heads.size() > kMaxSize)  // both are below 2^31
    return invalid_argument(message(rows.name(), " = ", rows.size(), " and ", heads.name(), " = ",
                                    heads.size(), "; rows * heads must be at most ", kMaxSize));
  if (!is_given(f.lse.tensor)) return {};
  FLASH3_CHECK(check_same({f.lse, 0}, heads, "heads"));
  return check_same({f.lse, 1}, rows, "rows");
}

Status check_tensors(const Fields& f, Pointers pointers) {
  FLASH3_CHECK(check_float32(f.out_parts, ""));
  FLASH3_CHECK(check_float32(f.lse_parts, ""));
  FLASH3_CHECK(check_form(f.out));
  const bool has_lse = is_given(f.lse.tensor);
  if (has_lse) FLASH3_CHECK(check_float32(f.lse, "; an lse that is not wanted is all zero"));
  FLASH3_CHECK(check_shapes(f));
  for (const Field& each : {f.out_parts, f.lse_parts, f.out}) {
    FLASH3_CHECK(check_strides(each));
    FLASH3_CHECK(check_data(each, pointers));
  }
  FLASH3_CHECK(check_no_overlap(f.out));
  if (is_given(f.sink.tensor)) FLASH3_CHECK(check_sink(f.sink, f.out, f.out, pointers));
  if (!has_lse) return {};
  FLASH3_CHECK(check_strides(f.lse));
  FLASH3_CHECK(check_no_overlap(f.lse));
  return check_data(f.lse, pointers);
}

}  // namespace

Status make_merge_problem(const flash3_merge_params* params, Pointers pointers,
                          MergeProblem* problem) {
  WholeParams<flash3_merge_params> whole;
  FLASH3_CHECK(whole.read(params));
  const auto& p = *whole;
  FLASH3_CHECK(check_tensors(fields_of(p), pointers));
  FLASH3_CHECK(check_context(p));
  MergeProblem made;
  made.out_dtype = p.out.dtype;
  made.out_parts = view(p.out_parts);
  made.lse_parts = lse_view(p.lse_parts);
  made.parts = made.out_parts.batch;
  made.rows = made.out_parts.seq;
  made.heads = made.out_parts.heads;
  made.head_dim_v = static_cast<int>(made.out_parts.dim);
  made.out = packed_view(p.out, 1, made.rows);
  made.lse = packed_lse_view(p.lse);
  made.sink = sink_view(p.sink);
  fill_context(p, &made);
  *problem = made;
  return check_aliases(p, made);
}

}  // namespace flash3
