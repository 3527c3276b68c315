// SPDX-License-Identifier: Apache-2.0
// Every address and option of a call, in one list for each kind: who checks that memory can be
// accessed, and who runs a plan with other addresses, walks the same one.
#pragma once

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
// the first failure ends the walk.

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
  return visit("v_scale", &Params::v_scale, p.v_scale.data, kRead);
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
  return visit("dsink", &Params::dsink, p.dsink.data, kWrite);
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
  return visit_sequences(p, visit);
}

template <MaybeConst<MergeProblem> P, class Visit>
Status visit_pointers(P& p, const Visit& visit) {
  using Params = flash3_merge_params;
  FLASH3_CHECK(visit("out_parts", &Params::out_parts, p.out_parts.data, kRead));
  FLASH3_CHECK(visit("lse_parts", &Params::lse_parts, p.lse_parts.data, kRead));
  FLASH3_CHECK(visit("out", &Params::out, p.out.data, kWrite));
  FLASH3_CHECK(visit("lse", &Params::lse, p.lse.data, kWrite));
  return visit("sink", &Params::sink, p.sink.data, kRead);
}

// ---- options ----
// visit_options(a, b, visit) calls visit(name, a's, b's) for each field that is no tensor, and
// neither stream nor workspace; likewise.

template <class Params, class Visit>
Status visit_attention_options(const Params& a, const Params& b, const Visit& visit) {
  FLASH3_CHECK(visit("softmax_scale", a.softmax_scale, b.softmax_scale));
  FLASH3_CHECK(visit("causal", a.causal, b.causal));
  FLASH3_CHECK(visit("window", a.window, b.window));
  FLASH3_CHECK(visit("window_left", a.window_left, b.window_left));
  FLASH3_CHECK(visit("window_right", a.window_right, b.window_right));
  FLASH3_CHECK(visit("softcap", a.softcap, b.softcap));
  return visit("chunk", a.chunk, b.chunk);
}

template <class Params, class Visit>
Status visit_context_options(const Params& a, const Params& b, const Visit& visit) {
  FLASH3_CHECK(visit("backend", a.backend, b.backend));
  return visit("num_threads", a.num_threads, b.num_threads);
}

template <class Params, class Visit>
Status visit_common_options(const Params& a, const Params& b, const Visit& visit) {
  FLASH3_CHECK(visit_context_options(a, b, visit));
  FLASH3_CHECK(visit("max_seqlen_q", a.max_seqlen_q, b.max_seqlen_q));
  return visit("max_seqlen_k", a.max_seqlen_k, b.max_seqlen_k);
}

template <class Visit>
Status visit_options(const flash3_forward_params& a, const flash3_forward_params& b,
                     const Visit& visit) {
  FLASH3_CHECK(visit_attention_options(a, b, visit));
  FLASH3_CHECK(visit("compute", a.compute, b.compute));
  FLASH3_CHECK(visit("rotation_seed", a.rotation_seed, b.rotation_seed));
  FLASH3_CHECK(visit("rotary_interleaved", a.rotary_interleaved, b.rotary_interleaved));
  FLASH3_CHECK(visit("sm_margin", a.sm_margin, b.sm_margin));
  FLASH3_CHECK(visit("rotate", a.rotate, b.rotate));
  FLASH3_CHECK(visit("fp8_sums", a.fp8_sums, b.fp8_sums));
  FLASH3_CHECK(visit("fill_padding", a.fill_padding, b.fill_padding));
  return visit_common_options(a, b, visit);
}

template <class Visit>
Status visit_options(const flash3_backward_params& a, const flash3_backward_params& b,
                     const Visit& visit) {
  FLASH3_CHECK(visit_attention_options(a, b, visit));
  FLASH3_CHECK(visit("deterministic", a.deterministic, b.deterministic));
  FLASH3_CHECK(visit("fill_padding", a.fill_padding, b.fill_padding));
  return visit_common_options(a, b, visit);
}

template <class Visit>
Status visit_options(const flash3_quantize_params& a, const flash3_quantize_params& b,
                     const Visit& visit) {
  FLASH3_CHECK(visit("rotary_interleaved", a.rotary_interleaved, b.rotary_interleaved));
  FLASH3_CHECK(visit("rotate", a.rotate, b.rotate));
  FLASH3_CHECK(visit("rotary_offset_q", a.rotary_offset_q, b.rotary_offset_q));
  FLASH3_CHECK(visit("rotary_offset_k", a.rotary_offset_k, b.rotary_offset_k));
  FLASH3_CHECK(visit("rotation_seed", a.rotation_seed, b.rotation_seed));
  return visit_common_options(a, b, visit);
}

template <class Visit>
Status visit_options(const flash3_merge_params& a, const flash3_merge_params& b,
                     const Visit& visit) {
  return visit_context_options(a, b, visit);
}

}  // namespace flash3
