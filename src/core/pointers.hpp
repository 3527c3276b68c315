// SPDX-License-Identifier: Apache-2.0
// Every address and option of a call, in one list for each kind. The check that memory can be
// accessed and a run of a plan with other addresses walk the same list.
#pragma once

#include "core/fields.hpp"
#include "core/problem.hpp"

namespace flash3 {

// What the call does to the memory, as a message says it.
inline constexpr const char kRead[] = "read", kWrite[] = "write";

template <class T, class P>
concept MaybeConst = std::same_as<std::remove_const_t<T>, P>;

// The params of a kind of problem.
template <class P>
struct ParamsOf;
template <MaybeConst<ForwardProblem> P>
struct ParamsOf<P> {
  using type = flash3_forward_params;
};
template <MaybeConst<BackwardProblem> P>
struct ParamsOf<P> {
  using type = flash3_backward_params;
};
template <MaybeConst<QuantizeProblem> P>
struct ParamsOf<P> {
  using type = flash3_quantize_params;
};

template <MaybeConst<MergeProblem> P>
struct ParamsOf<P> {
  using type = flash3_merge_params;
};

// ---- addresses ----
// visit_pointers(problem, visit) calls visit(name, member, pointer, access) for each tensor of a
// call: its member of the params, and the problem's pointer to its data. visit returns a Status;
// the first failure ends the walk. Tensors of added_fields() come last and need no line here.

template <class P, class Visit>
Status visit_added(P& p, const Visit& visit) {
  using Fields = FieldsOf<typename ParamsOf<P>::type>;
  Status status;
  if constexpr (requires { Fields::visit_added_tensors(p, visit); })
    Fields::visit_added_tensors(p, [&](const ParamField& field, auto member, auto& view) {
      const char* const name = field.name.data();  // NOLINT: it is a literal
      status = visit(name, member, view.data, field.is_written ? kWrite : kRead);
      return status.ok();
    });
  return status;
}

template <class P, class Visit>
Status visit_sequences(P& p, const Visit& visit) {
  using Params = typename ParamsOf<P>::type;
  FLASH3_CHECK(visit("cu_seqlens_q", &Params::cu_seqlens_q, p.sequences_q.cu, kRead));
  FLASH3_CHECK(visit("cu_seqlens_k", &Params::cu_seqlens_k, p.sequences_k.cu, kRead));
  FLASH3_CHECK(visit("seqused_q", &Params::seqused_q, p.sequences_q.used, kRead));
  return visit("seqused_k", &Params::seqused_k, p.sequences_k.used, kRead);
}

// What forward and backward share; `access`: to out and lse. A cache that grows is written.
template <class P, class Visit>
Status visit_attention(P& p, const char* access, const Visit& visit) {
  using Params = typename ParamsOf<P>::type;
  FLASH3_CHECK(visit("q", &Params::q, p.q.data, kRead));
  const char* access_kv = p.append.given ? kWrite : kRead;
  FLASH3_CHECK(visit("k", &Params::k, p.k.data, access_kv));
  FLASH3_CHECK(visit("v", &Params::v, p.v.data, access_kv));
  FLASH3_CHECK(visit("out", &Params::out, p.out.data, access));
  FLASH3_CHECK(visit("lse", &Params::lse, p.lse.data, access));
  FLASH3_CHECK(visit_sequences(p, visit));
  return visit("sink", &Params::sink, p.sink.data, kRead);
}

template <class P, class Visit>
Status visit_cache(P& p, const Visit& visit) {
  using Params = flash3_forward_params;
  auto& append = p.append;
  FLASH3_CHECK(visit("page_table", &Params::page_table, p.cache.page_table, kRead));
  FLASH3_CHECK(visit("cache_batch_idx", &Params::cache_batch_idx, p.cache.batch_idx, kRead));
  FLASH3_CHECK(visit("leftpad_k", &Params::leftpad_k, p.cache.leftpad, kRead));
  FLASH3_CHECK(visit("k_new", &Params::k_new, append.k.data, kRead));
  FLASH3_CHECK(visit("v_new", &Params::v_new, append.v.data, kRead));
  FLASH3_CHECK(visit("cu_seqlens_k_new", &Params::cu_seqlens_k_new, append.sequences.cu, kRead));
  FLASH3_CHECK(visit("rotary_cos", &Params::rotary_cos, append.rotary.cos, kRead));
  FLASH3_CHECK(visit("rotary_sin", &Params::rotary_sin, append.rotary.sin, kRead));
  return visit("rotary_offsets", &Params::rotary_offsets, append.rotary_offsets, kRead);
}

template <MaybeConst<ForwardProblem> P, class Visit>
Status visit_pointers(P& p, const Visit& visit) {
  using Params = flash3_forward_params;
  FLASH3_CHECK(visit_attention(p, kWrite, visit));
  FLASH3_CHECK(visit("qv", &Params::qv, p.qv.data, kRead));
  FLASH3_CHECK(visit_cache(p, visit));
  FLASH3_CHECK(visit("tree_mask", &Params::tree_mask, p.tree.words, kRead));
  FLASH3_CHECK(visit("q_scale", &Params::q_scale, p.q_scale.data, kRead));
  FLASH3_CHECK(visit("k_scale", &Params::k_scale, p.k_scale.data, kRead));
  FLASH3_CHECK(visit("v_scale", &Params::v_scale, p.v_scale.data, kRead));
  return visit_added(p, visit);
}

template <MaybeConst<BackwardProblem> P, class Visit>
Status visit_pointers(P& p, const Visit& visit) {
  using Params = flash3_backward_params;
  FLASH3_CHECK(visit_attention(p, kRead, visit));
  FLASH3_CHECK(visit("dout", &Params::dout, p.dout.data, kRead));
  FLASH3_CHECK(visit("dlse", &Params::dlse, p.dlse.data, kRead));
  FLASH3_CHECK(visit("dq", &Params::dq, p.dq.data, kWrite));
  FLASH3_CHECK(visit("dk", &Params::dk, p.dk.data, kWrite));
  FLASH3_CHECK(visit("dv", &Params::dv, p.dv.data, kWrite));
  FLASH3_CHECK(visit("dsink", &Params::dsink, p.dsink.data, kWrite));
  return visit_added(p, visit);
}

template <MaybeConst<QuantizeProblem> P, class Visit>
Status visit_pointers(P& p, const Visit& visit) {
  using Params = flash3_quantize_params;
  FLASH3_CHECK(visit("q", &Params::q, p.q.in.data, kRead));
  FLASH3_CHECK(visit("k", &Params::k, p.k.in.data, kRead));
  FLASH3_CHECK(visit("v", &Params::v, p.v.in.data, kRead));
  FLASH3_CHECK(visit("q_out", &Params::q_out, p.q.out.data, kWrite));
  FLASH3_CHECK(visit("k_out", &Params::k_out, p.k.out.data, kWrite));
  FLASH3_CHECK(visit("v_out", &Params::v_out, p.v.out.data, kWrite));
  FLASH3_CHECK(visit("q_scale", &Params::q_scale, p.q.scale.data, kWrite));
  FLASH3_CHECK(visit("k_scale", &Params::k_scale, p.k.scale.data, kWrite));
  FLASH3_CHECK(visit("v_scale", &Params::v_scale, p.v.scale.data, kWrite));
  FLASH3_CHECK(visit("rotary_cos", &Params::rotary_cos, p.rotary.cos, kRead));
  FLASH3_CHECK(visit("rotary_sin", &Params::rotary_sin, p.rotary.sin, kRead));
  FLASH3_CHECK(visit_sequences(p, visit));
  return visit_added(p, visit);
}

template <MaybeConst<MergeProblem> P, class Visit>
Status visit_pointers(P& p, const Visit& visit) {
  using Params = flash3_merge_params;
  FLASH3_CHECK(visit("out_parts", &Params::out_parts, p.out_parts.data, kRead));
  FLASH3_CHECK(visit("lse_parts", &Params::lse_parts, p.lse_parts.data, kRead));
  FLASH3_CHECK(visit("out", &Params::out, p.out.data, kWrite));
  FLASH3_CHECK(visit("lse", &Params::lse, p.lse.data, kWrite));
  FLASH3_CHECK(visit("sink", &Params::sink, p.sink.data, kRead));
  return visit_added(p, visit);
}

// ---- options ----

// Calls visit(name, a's, b's) for each field that is no tensor and does not say where the call
// runs; likewise.
template <class Params, class Visit>
Status visit_options(const Params& a, const Params& b, const Visit& visit) {
  for (const ParamField& field : FieldsOf<Params>::kFields) {
    if (!field.is_option()) continue;
    FLASH3_CHECK(visit_values(field, &a, &b, [&](auto of_a, auto of_b) -> Status {
      return visit(field.name, of_a, of_b);
    }));
  }
  return {};
}

}  // namespace flash3
