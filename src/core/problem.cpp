// The one place where user input is checked: params of the C interface in, a problem out.
#include "core/problem.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/message.hpp"
#include "core/sequence_checks.hpp"
#include "core/tensor_checks.hpp"

namespace flash3 {
namespace {

// Names and dimensions of a call's tensors: packed on the side of q, of k, on both or neither.
struct Layout {
  bool packed_q, packed_k;

  Field q(const char* name, const flash3_tensor& t) const {
    return packed_q ? Field{name, "[total_q, heads_q, head_dim]", 3, t}
                    : Field{name, "[batch, seq_q, heads_q, head_dim]", 4, t};
  }
  Field out(const char* name, const flash3_tensor& t) const {
    return packed_q ? Field{name, "[total_q, heads_q, head_dim_v]", 3, t}
                    : Field{name, "[batch, seq_q, heads_q, head_dim_v]", 4, t};
  }
  Field lse(const char* name, const flash3_tensor& t) const {
    return packed_q ? Field{name, "[heads_q, total_q]", 2, t}
                    : Field{name, "[batch, heads_q, seq_q]", 3, t};
  }
  Field k(const char* name, const flash3_tensor& t) const {
    return packed_k ? Field{name, "[total_k, heads_k, head_dim]", 3, t}
                    : Field{name, "[batch, seq_k, heads_k, head_dim]", 4, t};
  }
  Field v(const char* name, const flash3_tensor& t) const {
    return packed_k ? Field{name, "[total_k, heads_k, head_dim_v]", 3, t}
                    : Field{name, "[batch, seq_k, heads_k, head_dim_v]", 4, t};
  }
};

template <class Params>
SequenceFields sequences_of_q(const Params& p) {
  return {{"cu_seqlens_q", "[batch + 1]", 1, p.cu_seqlens_q},
          {"seqused_q", "[batch]", 1, p.seqused_q},
          "max_seqlen_q",
          p.max_seqlen_q};
}

template <class Params>
SequenceFields sequences_of_k(const Params& p) {
  return {{"cu_seqlens_k", "[batch + 1]", 1, p.cu_seqlens_k},
          {"seqused_k", "[batch]", 1, p.seqused_k},
          "max_seqlen_k",
          p.max_seqlen_k};
}

// The number of sequences, where q or k tells it.
Extent batch_of(const Field& tensor, const SequenceFields& sequences) {
  return sequences.packed() ? Extent{sequences.cu, 0, 1} : Extent{tensor, 0};
}

const char* params_name(const flash3_forward_params&) { return "flash3_forward_params"; }
const char* params_name(const flash3_backward_params&) { return "flash3_backward_params"; }

// What the params took in their first version. Fields are only ever added at the end, so a caller
// built against any version passes at least this much.
template <class Params>
constexpr size_t kFirstParamsSize =
    offsetof(Params, workspace_size) + sizeof(Params::workspace_size);

// No version will come near this: a struct_size beyond it was never set, and reading that far would
// crash.
constexpr size_t kPlausibleParamsSize = 4096;

// Fields that a newer header has and this library has not must be zero: they ask for nothing.
template <class Params>
Status read_params(const Params* given, Params* params) {
  const char* type = params_name(*params);
  if (!given) return invalid_argument(message("params is null; it must point to a ", type));
  const size_t size = given->struct_size;
  if (size < kFirstParamsSize<Params> || size > kPlausibleParamsSize)
    return invalid_argument(message("struct_size = ", size, " but ", type, " takes ",
                                    sizeof *params, " bytes; set struct_size = sizeof(", type,
                                    ")"));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof *params; i < size; ++i)
    if (bytes[i] != 0)
      return unsupported(message("struct_size = ", size, " but this library knows ", sizeof *params,
                                 " bytes, and byte ", i,
                                 " is set; the call was made for a newer flash3 than this one, ",
                                 FLASH3_VERSION_STRING));
  *params = {};  // fields that an older header has not ask for nothing
  std::memcpy(params, given, std::min(size, sizeof *params));
  return {};
}

Status check_flag(const char* name, int32_t value) {
  if (value == 0 || value == 1) return {};
  return invalid_argument(message(name, " = ", value, " but it must be 0 or 1"));
}

template <class Params>
Status check_options(const Params& p) {
  if (!std::isfinite(p.softmax_scale) || p.softmax_scale < 0.f)
    return invalid_argument(message("softmax_scale = ", p.softmax_scale,
                                    " but it must be finite and at least 0 (0: 1/sqrt(head_dim))"));
  FLASH3_CHECK(check_flag("causal", p.causal));
  FLASH3_CHECK(check_flag("window", p.window));
  if (p.backend < FLASH3_BACKEND_AUTO || p.backend > FLASH3_BACKEND_CPU)
    return invalid_argument(
        message("backend = ", p.backend, " but it must be 0 (auto), 1 (hopper) or 2 (cpu)"));
  if (p.num_threads < 0)
    return invalid_argument(
        message("num_threads = ", p.num_threads, " but it must be at least 0 (0: one per core)"));
  if (!(p.softcap >= 0.f) || std::isinf(p.softcap))
    return invalid_argument(
        message("softcap = ", p.softcap, " but it must be finite and at least 0 (0: none)"));
  if (p.chunk < 0)
    return invalid_argument(message("chunk = ", p.chunk, " but it must be at least 0 (0: none)"));
  return {};
}

// What both kinds of call say of q, k, v and out, once each by itself is in form: how they agree
// with each other, with the sequences and with the sink.
template <class Params>
Status check_agreement(const Params& p, const Field& q, const Field& k, const Field& v,
                       const Field& out, Pointers pointers) {
  const SequenceFields sequences_q = sequences_of_q(p), sequences_k = sequences_of_k(p);
  const Extent batch_q = batch_of(q, sequences_q), batch_k = batch_of(k, sequences_k);
  FLASH3_CHECK(check_shapes(q, k, v, out, batch_q, batch_k));
  FLASH3_CHECK(check_used(sequences_q, batch_q));
  FLASH3_CHECK(check_used(sequences_k, batch_q));
  return is_given(p.sink) ? check_sink({"sink", "[heads_q]", 1, p.sink}, q, pointers) : Status();
}

template <class Params>
Status check_sequences(const Params& p, Pointers pointers, Layout* layout) {
  FLASH3_CHECK(check_sequence_fields(sequences_of_q(p), pointers));
  FLASH3_CHECK(check_sequence_fields(sequences_of_k(p), pointers));
  *layout = {is_given(p.cu_seqlens_q), is_given(p.cu_seqlens_k)};
  return {};
}

Status check_tensors(const flash3_forward_params& p, Pointers pointers) {
  Layout layout;
  FLASH3_CHECK(check_sequences(p, pointers, &layout));
  const Field q = layout.q("q", p.q), k = layout.k("k", p.k), v = layout.v("v", p.v);
  const Field out = layout.out("out", p.out), lse = layout.lse("lse", p.lse);

  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_form(f));
  FLASH3_CHECK(check_same_dtype({q, k, v, out}));
  FLASH3_CHECK(check_agreement(p, q, k, v, out, pointers));
  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_strides(f));
  FLASH3_CHECK(check_no_overlap(out));
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

  for (const Field& f : all) FLASH3_CHECK(check_form(f));
  FLASH3_CHECK(check_same_dtype(all));
  FLASH3_CHECK(check_agreement(p, q, k, v, out, pointers));
  FLASH3_CHECK(check_same_shape(dout, out));
  FLASH3_CHECK(check_same_shape(dq, q));
  FLASH3_CHECK(check_same_shape(dk, k));
  FLASH3_CHECK(check_same_shape(dv, v));
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

Sequences sequences(const flash3_tensor& tensor, const SequenceFields& fields) {
  Sequences made;
  made.packed = fields.packed();
  made.has_used = fields.has_used();
  made.cu = static_cast<const int*>(fields.cu.tensor.data);
  made.used = static_cast<const int*>(fields.used.tensor.data);
  made.rows = tensor.shape[made.packed ? 0 : 1];
  made.max_length =
      fields.max_length > 0 ? std::min<Index>(fields.max_length, made.rows) : made.rows;
  made.bounded = fields.max_length > 0 || !made.packed;
  return made;
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

// The fields that both kinds of call have.
template <class Params>
void fill(const Params& p, Problem* problem) {
  problem->dtype = p.q.dtype;
  problem->sequences_q = sequences(p.q, sequences_of_q(p));
  problem->sequences_k = sequences(p.k, sequences_of_k(p));
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
  problem->softmax_scale = p.softmax_scale > 0.f
                               ? p.softmax_scale
                               : static_cast<float>(1.0 / std::sqrt(double(problem->head_dim)));
  problem->softcap = p.softcap;
  problem->sink = sink_view(p.sink);
  if (p.window) problem->mask_rule = {p.window_left, p.window_right};
  // causal is window_right = 0, the narrowest bound that a window can have on that side.
  if (p.causal) problem->mask_rule.window_right = 0;
  problem->mask_rule.chunk = std::min(p.chunk, kMaxSize);  // no sequence is longer
  problem->backend = static_cast<flash3_backend>(p.backend);
  problem->num_threads = p.num_threads;
  problem->stream = p.stream;
  problem->workspace = p.workspace;
  problem->workspace_size = p.workspace_size;
}

}  // namespace

Status make_forward_problem(const flash3_forward_params* params, Pointers pointers,
                            ForwardProblem* problem) {
  flash3_forward_params p;
  FLASH3_CHECK(read_params(params, &p));
  FLASH3_CHECK(check_tensors(p, pointers));
  FLASH3_CHECK(check_options(p));
  ForwardProblem made;
  fill(p, &made);
  *problem = made;
  return {};
}

Status make_backward_problem(const flash3_backward_params* params, Pointers pointers,
                             BackwardProblem* problem) {
  flash3_backward_params p;
  FLASH3_CHECK(read_params(params, &p));
  FLASH3_CHECK(check_tensors(p, pointers));
  FLASH3_CHECK(check_options(p));
  FLASH3_CHECK(check_flag("deterministic", p.deterministic));
  BackwardProblem made;
  fill(p, &made);
  made.dout = view_q(made, p.dout);
  made.dlse = view_lse(made, p.dlse);
  made.dq = view_q(made, p.dq);
  made.dk = view_k(made, p.dk);
  made.dv = view_k(made, p.dv);
  made.dsink = sink_view(p.dsink);
  made.deterministic = p.deterministic != 0;
  *problem = made;
  return {};
}

const char* dtype_name(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_DTYPE_NONE: return "none";
    case FLASH3_FLOAT16: return "float16";
    case FLASH3_BFLOAT16: return "bfloat16";
    case FLASH3_FLOAT32: return "float32";
    case FLASH3_INT32: return "int32";
  }
  return "unknown";
}

int dtype_size(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16:
    case FLASH3_BFLOAT16: return 2;
    case FLASH3_FLOAT32:
    case FLASH3_INT32: return 4;
    case FLASH3_DTYPE_NONE: break;
  }
  return 0;
}

}  // namespace flash3
