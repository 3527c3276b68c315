// The C interface: nothing thrown gets past it, and every failure leaves its sentence behind.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "core/backend.hpp"
#include "core/message.hpp"
#include "core/problem.hpp"

namespace flash3 {
namespace {

// The sentence is `text`, or the literal that `fixed` points to where no memory was left for a
// string.
struct LastError {
  std::string text;
  const char* fixed = nullptr;
};

LastError& last_error() {
  thread_local LastError error;
  return error;
}

flash3_status fail(flash3_status code, std::string text) noexcept {
  LastError& error = last_error();
  error.text = std::move(text);
  error.fixed = nullptr;
  return code;
}

flash3_status fail_literal(flash3_status code, const char* text) noexcept {
  last_error().fixed = text;
  return code;
}

// Runs the body of a C function and turns what it returns or throws into a status.
template <class Body>
flash3_status guarded(const Body& body) noexcept {
  try {
    Status status = body();
    return status.ok() ? FLASH3_OK : fail(status.code(), status.message());
  } catch (const std::bad_alloc&) {
    return fail_literal(FLASH3_OUT_OF_MEMORY, "host memory ran out");
  } catch (const std::exception& e) {
    try {
      return fail(FLASH3_INTERNAL_ERROR, message("unexpected exception: ", e.what()));
    } catch (...) {
      return fail_literal(FLASH3_INTERNAL_ERROR, "unexpected exception");
    }
  } catch (...) {
    return fail_literal(FLASH3_INTERNAL_ERROR, "unexpected exception of unknown type");
  }
}

// The buffer rule of flash3.h: at most *size bytes with the final NUL, and *size becomes what the
// whole text takes.
Status give_text(const std::string& text, char* buffer, size_t* size) {
  if (buffer && *size > 0) {
    const size_t length = std::min(text.size(), *size - 1);
    std::memcpy(buffer, text.data(), length);
    buffer[length] = '\0';
  }
  *size = text.size() + 1;
  return {};
}

Status check_result(const void* pointer, const char* name) {
  if (pointer) return {};
  return invalid_argument(message(name, " is null; it must point to where the result goes"));
}

Status check_backend_id(flash3_backend id) {
  if (id >= FLASH3_BACKEND_AUTO && id <= FLASH3_BACKEND_CPU) return {};
  return invalid_argument(message("backend = ", static_cast<int32_t>(id),
                                  " but it must be 0 (auto), 1 (hopper) or 2 (cpu)"));
}

// ---- what explain says of the call itself, before the backend's own lines ----

// "5"; of sequences of different lengths "up to 5", and for packed ones what holds them.
std::string describe_length(const Sequences& s) {
  if (s.packed) return message("up to ", s.max_length, " of ", s.rows, " packed rows");
  return message(s.has_used ? "up to " : "", s.max_length);
}

std::string describe_sizes(const Problem& p) {
  return message(dtype_name(p.dtype), ", batch ", p.batch, ", seq_q ",
                 describe_length(p.sequences_q), ", seq_k ", describe_length(p.sequences_k),
                 ", heads_q ", p.heads_q, ", heads_k ", p.heads_k, ", head_dim ", p.head_dim,
                 ", head_dim_v ", p.head_dim_v);
}

std::string describe_sink(const Problem& p) {
  return p.sink.given ? message(", with ", dtype_name(p.sink.dtype), " sink") : "";
}

std::string describe_problem(const ForwardProblem& p) {
  return message(describe_sizes(p), p.lse.wanted ? ", with lse" : "", describe_sink(p));
}

std::string describe_problem(const BackwardProblem& p) {
  return message("backward, ", describe_sizes(p), p.dlse.wanted ? ", with dlse" : "",
                 describe_sink(p), p.dsink.given ? ", with dsink" : "",
                 p.deterministic ? ", deterministic" : "");
}

// "i + 3"; in a ragged batch each sequence has its own shift.
std::string describe_bound(const Problem& p, Index window, Index bound) {
  if (!p.is_ragged()) return message("i + ", bound);
  return window == 0 ? "i'" : message(window < 0 ? "i' - " : "i' + ", std::abs(window));
}

std::string describe_mask(const Problem& p) {
  const MaskRule& rule = p.mask_rule;
  const Band band = p.band();
  const bool left = band.lo > -Band::kUnbounded, right = band.hi < Band::kUnbounded;
  const bool none =
      p.is_ragged() ? !left && !right && rule.chunk == 0 : p.mask().is_full(p.seq_q, p.seq_k);
  if (none) return "none";
  std::string text = "query i sees keys j with ";
  if (left) append(text, message(describe_bound(p, -rule.window_left, band.lo), " <= "));
  if (left || right || rule.chunk == 0) append(text, "j");
  if (right) append(text, message(" <= ", describe_bound(p, rule.window_right, band.hi)));
  if (rule.chunk > 0)
    append(text, message(left || right ? " and " : "", "j / ", rule.chunk, " = ",
                         p.is_ragged() ? "i'" : message("(i + ", p.seq_k - p.seq_q, ")"), " / ",
                         rule.chunk, ", rounded down"));
  if (p.is_ragged()) append(text, ", with i' = i + the sequence's keys - its queries");
  return text;
}

// For auto, why not the better backends.
template <AnyProblem P>
std::string describe_choice(const P& p, const Backend& chosen) {
  std::string text = "auto";
  for (const flash3_backend id : {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
    if (id == chosen.id()) break;
    const Backend* unused = nullptr;
    append(text,
           message("; not ", backend_name(id), ": ", check_backend(p, id, &unused).message()));
  }
  return text;
}

const char* describe_empty(const ForwardProblem&) { return "none (the output has no elements)"; }
const char* describe_empty(const BackwardProblem&) {
  return "none (the gradients have no elements)";
}

template <AnyProblem P>
Status explain(const P& p, std::string* text) {
  const Backend* backend = nullptr;
  if (!p.is_empty()) FLASH3_CHECK(select_backend(p, &backend));
  Explanation lines;
  lines.add("backend", backend ? backend->name() : describe_empty(p));
  if (backend && p.backend == FLASH3_BACKEND_AUTO)
    lines.add("chosen by", describe_choice(p, *backend));
  lines.add("problem", describe_problem(p));
  lines.add("mask", describe_mask(p));
  lines.add("softmax_scale", message(p.softmax_scale));
  if (p.softcap > 0.f) lines.add("softcap", message(p.softcap));
  if (backend) backend->explain(p, &lines);
  *text = lines.text();
  return {};
}

// ---- the four functions that each kind of call has ----
// A call with no output element is valid, needs no backend, and does nothing.

Status make_problem(const flash3_forward_params* params, Pointers pointers, ForwardProblem* p) {
  return make_forward_problem(params, pointers, p);
}
Status make_problem(const flash3_backward_params* params, Pointers pointers, BackwardProblem* p) {
  return make_backward_problem(params, pointers, p);
}

Status launch(const Backend& backend, const ForwardProblem& p) { return backend.forward(p); }
Status launch(const Backend& backend, const BackwardProblem& p) { return backend.backward(p); }

template <AnyProblem P, class Params>
flash3_status answer_supported(const Params* params) {
  return guarded([&]() -> Status {
    P problem;
    FLASH3_CHECK(make_problem(params, Pointers::kOptional, &problem));
    const Backend* backend = nullptr;
    return problem.is_empty() ? Status() : select_backend(problem, &backend);
  });
}

template <AnyProblem P, class Params>
flash3_status answer_workspace(const Params* params, size_t* bytes) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(bytes, "bytes"));
    P problem;
    FLASH3_CHECK(make_problem(params, Pointers::kOptional, &problem));
    const Backend* backend = nullptr;
    if (!problem.is_empty()) FLASH3_CHECK(select_backend(problem, &backend));
    *bytes = backend ? backend->workspace_size(problem) : 0;
    return {};
  });
}

template <AnyProblem P, class Params>
flash3_status run(const Params* params) {
  return guarded([&]() -> Status {
    P problem;
    FLASH3_CHECK(make_problem(params, Pointers::kRequired, &problem));
    if (problem.is_empty()) return {};
    const Backend* backend = nullptr;
    FLASH3_CHECK(select_backend(problem, &backend));
    FLASH3_CHECK(check_workspace(problem, *backend));
    return launch(*backend, problem);
  });
}

template <AnyProblem P, class Params>
flash3_status answer_explain(const Params* params, char* buffer, size_t* size) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(size, "size"));
    P problem;
    FLASH3_CHECK(make_problem(params, Pointers::kOptional, &problem));
    std::string text;
    FLASH3_CHECK(explain(problem, &text));
    return give_text(text, buffer, size);
  });
}

}  // namespace
}  // namespace flash3

flash3_status flash3_forward_supported(const flash3_forward_params* params) {
  return flash3::answer_supported<flash3::ForwardProblem>(params);
}

flash3_status flash3_forward_workspace(const flash3_forward_params* params, size_t* bytes) {
  return flash3::answer_workspace<flash3::ForwardProblem>(params, bytes);
}

flash3_status flash3_forward(const flash3_forward_params* params) {
  return flash3::run<flash3::ForwardProblem>(params);
}

flash3_status flash3_forward_explain(const flash3_forward_params* params, char* buffer,
                                     size_t* size) {
  return flash3::answer_explain<flash3::ForwardProblem>(params, buffer, size);
}

flash3_status flash3_backward_supported(const flash3_backward_params* params) {
  return flash3::answer_supported<flash3::BackwardProblem>(params);
}

flash3_status flash3_backward_workspace(const flash3_backward_params* params, size_t* bytes) {
  return flash3::answer_workspace<flash3::BackwardProblem>(params, bytes);
}

flash3_status flash3_backward(const flash3_backward_params* params) {
  return flash3::run<flash3::BackwardProblem>(params);
}

flash3_status flash3_backward_explain(const flash3_backward_params* params, char* buffer,
                                      size_t* size) {
  return flash3::answer_explain<flash3::BackwardProblem>(params, buffer, size);
}

flash3_status flash3_backend_available(flash3_backend id) {
  return flash3::guarded([&]() -> flash3::Status {
    FLASH3_CHECK(flash3::check_backend_id(id));
    const flash3::Backend* backend = nullptr;
    return flash3::available_backend(id, &backend);
  });
}

flash3_status flash3_backend_describe(flash3_backend id, char* buffer, size_t* size) {
  return flash3::guarded([&]() -> flash3::Status {
    FLASH3_CHECK(flash3::check_result(size, "size"));
    const flash3::Backend* backend = nullptr;
    FLASH3_CHECK(flash3::check_backend_id(id));
    FLASH3_CHECK(flash3::available_backend(id, &backend));
    return flash3::give_text(backend->describe(), buffer, size);
  });
}

const char* flash3_backend_name(flash3_backend id) { return flash3::backend_name(id); }

const char* flash3_dtype_name(flash3_dtype dtype) { return flash3::dtype_name(dtype); }

const char* flash3_status_name(flash3_status status) {
  switch (status) {
    case FLASH3_OK: return "ok";
    case FLASH3_INVALID_ARGUMENT: return "invalid argument";
    case FLASH3_UNSUPPORTED: return "unsupported";
    case FLASH3_CUDA_ERROR: return "cuda error";
    case FLASH3_OUT_OF_MEMORY: return "out of memory";
    case FLASH3_INTERNAL_ERROR: return "internal error";
  }
  return "unknown";
}

const char* flash3_last_error(void) {
  const flash3::LastError& error = flash3::last_error();
  return error.fixed ? error.fixed : error.text.c_str();
}

const char* flash3_version(void) { return FLASH3_VERSION_STRING; }
