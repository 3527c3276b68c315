// The one place where user input is checked: params of the C interface in, a problem out.
#include "core/problem.hpp"

#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/message.hpp"
#include "core/tensor_checks.hpp"

namespace flash3 {
namespace {

constexpr char kQLayout[] = "[batch, seq_q, heads_q, head_dim]";
constexpr char kOutLayout[] = "[batch, seq_q, heads_q, head_dim_v]";
constexpr char kKLayout[] = "[batch, seq_k, heads_k, head_dim]";
constexpr char kVLayout[] = "[batch, seq_k, heads_k, head_dim_v]";
constexpr char kLseLayout[] = "[batch, heads_q, seq_q]";

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
  std::memcpy(params, given, sizeof *params);
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
  return {};
}

Status check_tensors(const flash3_forward_params& p, Pointers pointers) {
  const Field q{"q", kQLayout, 4, p.q}, k{"k", kKLayout, 4, p.k}, v{"v", kVLayout, 4, p.v};
  const Field out{"out", kOutLayout, 4, p.out}, lse{"lse", kLseLayout, 3, p.lse};

  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_form(f));
  FLASH3_CHECK(check_same_dtype({q, k, v, out}));
  FLASH3_CHECK(check_shapes(q, k, v, out));
  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_strides(f));
  FLASH3_CHECK(check_no_overlap(out));
  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_data(f, pointers));

  if (!is_given(p.lse)) return {};
  FLASH3_CHECK(check_rows(lse, q, "; an lse that is not wanted is all zero"));
  FLASH3_CHECK(check_no_overlap(lse));
  return check_data(lse, pointers);
}

Status check_tensors(const flash3_backward_params& p, Pointers pointers) {
  const Field q{"q", kQLayout, 4, p.q}, k{"k", kKLayout, 4, p.k}, v{"v", kVLayout, 4, p.v};
  const Field out{"out", kOutLayout, 4, p.out}, dout{"dout", kOutLayout, 4, p.dout};
  const Field dq{"dq", kQLayout, 4, p.dq}, dk{"dk", kKLayout, 4, p.dk}, dv{"dv", kVLayout, 4, p.dv};
  const Field lse{"lse", kLseLayout, 3, p.lse}, dlse{"dlse", kLseLayout, 3, p.dlse};
  const auto all = {q, k, v, out, dout, dq, dk, dv};

  for (const Field& f : all) FLASH3_CHECK(check_form(f));
  FLASH3_CHECK(check_same_dtype(all));
  FLASH3_CHECK(check_shapes(q, k, v, out));
  FLASH3_CHECK(check_same_shape(dout, out));
  FLASH3_CHECK(check_same_shape(dq, q));
  FLASH3_CHECK(check_same_shape(dk, k));
  FLASH3_CHECK(check_same_shape(dv, v));
  for (const Field& f : all) FLASH3_CHECK(check_strides(f));
  for (const Field& f : {dq, dk, dv}) FLASH3_CHECK(check_no_overlap(f));
  for (const Field& f : all) FLASH3_CHECK(check_data(f, pointers));

  if (!is_given(p.lse))
    return invalid_argument(message("lse is all zero; the backward needs the lse, ", kLseLayout,
                                    ", that the forward has written"));
  FLASH3_CHECK(check_rows(lse, q, ""));
  FLASH3_CHECK(check_data(lse, pointers));
  if (!is_given(p.dlse)) return {};
  FLASH3_CHECK(check_rows(dlse, q, "; a dlse that is not given is all zero"));
  return check_data(dlse, pointers);
}

// The fields that both kinds of call have.
template <class Params>
void fill(const Params& p, Problem* problem) {
  problem->dtype = p.q.dtype;
  problem->batch = p.q.shape[0];
  problem->seq_q = p.q.shape[1];
  problem->seq_k = p.k.shape[1];
  problem->heads_q = p.q.shape[2];
  problem->heads_k = p.k.shape[2];
  problem->head_dim = static_cast<int>(p.q.shape[3]);
  problem->head_dim_v = static_cast<int>(p.v.shape[3]);
  problem->q = view(p.q);
  problem->k = view(p.k);
  problem->v = view(p.v);
  problem->out = view(p.out);
  problem->lse = lse_view(p.lse);
  problem->softmax_scale = p.softmax_scale > 0.f
                               ? p.softmax_scale
                               : static_cast<float>(1.0 / std::sqrt(double(problem->head_dim)));
  // causal is window_right = 0, the narrowest bound that a window can have on that side.
  const int64_t left = p.window ? p.window_left : -1;
  const int64_t right = p.causal ? 0 : p.window ? p.window_right : -1;
  problem->band = Band::make(problem->seq_q, problem->seq_k, left, right);
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
  made.dout = view(p.dout);
  made.dlse = lse_view(p.dlse);
  made.dq = view(p.dq);
  made.dk = view(p.dk);
  made.dv = view(p.dv);
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
  }
  return "unknown";
}

int dtype_size(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16:
    case FLASH3_BFLOAT16: return 2;
    case FLASH3_FLOAT32: return 4;
    case FLASH3_DTYPE_NONE: break;
  }
  return 0;
}

}  // namespace flash3
