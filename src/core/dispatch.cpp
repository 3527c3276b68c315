// SPDX-License-Identifier: Apache-2.0
// The registry of backends, the choice of the one that runs a call, and what it is asked for.
#include <algorithm>
#include <array>
#include <cstdint>

#include "core/backend.hpp"
#include "core/message.hpp"
#include "core/quantized_forward.hpp"

namespace flash3 {
namespace {

// What auto tries, whether built in or not.
constexpr flash3_backend kBestFirst[] = {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU};

Status not_built_in(flash3_backend id) {
  if (id == FLASH3_BACKEND_HOPPER)
    return unsupported(
        "the hopper backend is not built into this library; configure it with -DFLASH3_HOPPER=ON, "
        "which needs a CUDA toolkit >= 12.8");
  return unsupported(message("the ", backend_name(id), " backend is not built into this library"));
}

Status can_access(const Backend& backend, const void* address, bool* accessible) {
  *accessible = false;
  for (const Backend* other : backends()) {
    bool owned = false;
    if (other->id() != backend.id()) FLASH3_CHECK(other->owns(address, &owned));
    if (owned) return {};
  }
  return backend.can_access(address, accessible);
}

Status check_access(const Backend& backend, const char* field, const void* address,
                    const char* verb) {
  bool accessible = false;
  FLASH3_CHECK(can_access(backend, address, &accessible));
  if (accessible) return {};
  const char* memory = backend.id() == FLASH3_BACKEND_CPU ? "device memory" : "host memory";
  return invalid_argument(
      message(field, " is ", memory, ", which the ", backend.name(), " backend cannot ", verb));
}

// What a backend must be able to reach for a call. `verb`: what the call does to out and lse.
Status check_memory(const Backend& backend, const Problem& p, const char* verb) {
  FLASH3_CHECK(check_access(backend, "q.data", p.q.data, "read"));
  FLASH3_CHECK(check_access(backend, "k.data", p.k.data, "read"));
  FLASH3_CHECK(check_access(backend, "v.data", p.v.data, "read"));
  FLASH3_CHECK(check_access(backend, "out.data", p.out.data, verb));
  FLASH3_CHECK(check_access(backend, "lse.data", p.lse.data, verb));
  FLASH3_CHECK(check_access(backend, "cu_seqlens_q.data", p.sequences_q.cu, "read"));
  FLASH3_CHECK(check_access(backend, "cu_seqlens_k.data", p.sequences_k.cu, "read"));
  FLASH3_CHECK(check_access(backend, "seqused_q.data", p.sequences_q.used, "read"));
  FLASH3_CHECK(check_access(backend, "seqused_k.data", p.sequences_k.used, "read"));
  return check_access(backend, "sink.data", p.sink.data, "read");
}

Status check_memory(const Backend& backend, const ForwardProblem& p) {
  FLASH3_CHECK(check_memory(backend, p, "write"));
  FLASH3_CHECK(check_access(backend, "q_scale.data", p.q_scale.data, "read"));
  FLASH3_CHECK(check_access(backend, "k_scale.data", p.k_scale.data, "read"));
  return check_access(backend, "v_scale.data", p.v_scale.data, "read");
}

Status check_memory(const Backend& backend, const BackwardProblem& p) {
  FLASH3_CHECK(check_memory(backend, p, "read"));
  FLASH3_CHECK(check_access(backend, "dout.data", p.dout.data, "read"));
  FLASH3_CHECK(check_access(backend, "dlse.data", p.dlse.data, "read"));
  FLASH3_CHECK(check_access(backend, "dq.data", p.dq.data, "write"));
  FLASH3_CHECK(check_access(backend, "dk.data", p.dk.data, "write"));
  FLASH3_CHECK(check_access(backend, "dv.data", p.dv.data, "write"));
  return check_access(backend, "dsink.data", p.dsink.data, "write");
}

Status check_memory(const Backend& backend, const QuantizeProblem& p) {
  FLASH3_CHECK(check_access(backend, "q.data", p.q.in.data, "read"));
  FLASH3_CHECK(check_access(backend, "k.data", p.k.in.data, "read"));
  FLASH3_CHECK(check_access(backend, "v.data", p.v.in.data, "read"));
  FLASH3_CHECK(check_access(backend, "q_out.data", p.q.out.data, "write"));
  FLASH3_CHECK(check_access(backend, "k_out.data", p.k.out.data, "write"));
  FLASH3_CHECK(check_access(backend, "v_out.data", p.v.out.data, "write"));
  FLASH3_CHECK(check_access(backend, "q_scale.data", p.q.scale.data, "write"));
  FLASH3_CHECK(check_access(backend, "k_scale.data", p.k.scale.data, "write"));
  FLASH3_CHECK(check_access(backend, "v_scale.data", p.v.scale.data, "write"));
  FLASH3_CHECK(check_access(backend, "rotary_cos.data", p.rotary.cos, "read"));
  FLASH3_CHECK(check_access(backend, "rotary_sin.data", p.rotary.sin, "read"));
  FLASH3_CHECK(check_access(backend, "cu_seqlens_q.data", p.sequences_q.cu, "read"));
  FLASH3_CHECK(check_access(backend, "cu_seqlens_k.data", p.sequences_k.cu, "read"));
  FLASH3_CHECK(check_access(backend, "seqused_q.data", p.sequences_q.used, "read"));
  return check_access(backend, "seqused_k.data", p.sequences_k.used, "read");
}

const char* workspace_function(const ForwardProblem&) { return "flash3_forward_workspace"; }
const char* workspace_function(const BackwardProblem&) { return "flash3_backward_workspace"; }
const char* workspace_function(const QuantizeProblem&) { return "flash3_quantize_workspace"; }

Status launch_on(const Backend& backend, const ForwardProblem& p) { return backend.forward(p); }
Status launch_on(const Backend& backend, const BackwardProblem& p) { return backend.backward(p); }
Status launch_on(const Backend& backend, const QuantizeProblem& p) { return backend.quantize(p); }

// of(problem), or what together(…) makes of the two calls that problem comes to.
template <AnyProblem P, class Together, class Of>
auto split(const P& problem, const Together& together, const Of& of) {
  if constexpr (std::same_as<P, ForwardProblem>)
    if (problem.quantizes) return together(quantized_forward(problem));
  return of(problem);
}

}  // namespace

std::span<const Backend* const> backends() {
  static const std::array list = {
#if FLASH3_WITH_HOPPER
      &hopper_backend(),
#endif
      &cpu_backend(),
  };
  return list;
}

const Backend* find_backend(flash3_backend id) {
  for (const Backend* backend : backends())
    if (backend->id() == id) return backend;
  return nullptr;
}

Status available_backend(flash3_backend id, const Backend** backend) {
  *backend = nullptr;
  if (id != FLASH3_BACKEND_AUTO) {
    const Backend* candidate = find_backend(id);
    if (!candidate) return not_built_in(id);
    FLASH3_CHECK(candidate->available());
    *backend = candidate;
    return {};
  }
  std::string reasons = "no backend is available";
  for (const flash3_backend each : kBestFirst) {
    const Status status = available_backend(each, backend);
    if (status.ok()) return {};
    append(reasons, message("; ", backend_name(each), ": ", status.message()));
  }
  return unsupported(std::move(reasons));
}

template <AnyProblem P>
Status check_backend(const P& problem, flash3_backend id, const Backend** backend) {
  *backend = nullptr;
  const Backend* candidate = nullptr;
  FLASH3_CHECK(available_backend(id, &candidate));
  FLASH3_CHECK(check_memory(*candidate, problem));
  FLASH3_CHECK(supports(*candidate, problem));
  *backend = candidate;
  return {};
}

template <AnyProblem P>
Status select_backend(const P& problem, const Backend** backend) {
  if (problem.backend != FLASH3_BACKEND_AUTO)
    return check_backend(problem, problem.backend, backend);

  // A call that every backend calls wrong is wrong; one that any of them merely cannot run is
  // unsupported.
  flash3_status code = FLASH3_INVALID_ARGUMENT;
  std::string reasons = "no backend can run this call";
  for (const flash3_backend id : kBestFirst) {
    Status status = check_backend(problem, id, backend);
    if (status.ok()) return {};
    if (status.code() == FLASH3_CUDA_ERROR) return status;  // no other backend makes up for it
    if (status.code() != FLASH3_INVALID_ARGUMENT) code = FLASH3_UNSUPPORTED;
    append(reasons, message("; ", backend_name(id), ": ", status.message()));
  }
  return {code, std::move(reasons)};
}

template <AnyProblem P>
Status check_workspace(const P& problem, const Backend& backend) {
  const size_t needed = workspace_size(backend, problem);
  if (needed == 0) return {};
  if (!problem.workspace)
    return invalid_argument(message("workspace is null but this call needs ", needed, " bytes, as ",
                                    workspace_function(problem), " tells"));
  if (problem.workspace_size < needed)
    return invalid_argument(message("workspace_size = ", problem.workspace_size,
                                    " but this call needs ", needed, " bytes, as ",
                                    workspace_function(problem), " tells"));
  if (reinterpret_cast<uintptr_t>(problem.workspace) % kWorkspaceAlignment != 0)
    return invalid_argument(message("workspace = ", hex(problem.workspace),
                                    " but it must be a multiple of ", kWorkspaceAlignment));
  return check_access(backend, "workspace", problem.workspace, "use");
}

template <AnyProblem P>
Status supports(const Backend& backend, const P& problem) {
  return split(
      problem,
      [&](const QuantizedForward& both) -> Status {
        FLASH3_CHECK(backend.supports(both.quantize));
        return backend.supports(both.forward);
      },
      [&](const P& p) { return backend.supports(p); });
}

template <AnyProblem P>
size_t workspace_size(const Backend& backend, const P& problem) {
  return split(
      problem,
      [&](const QuantizedForward& both) {
        return both.tensor_bytes + std::max(backend.workspace_size(both.quantize),
                                            backend.workspace_size(both.forward));
      },
      [&](const P& p) { return backend.workspace_size(p); });
}

template <AnyProblem P>
void explain(const Backend& backend, const P& problem, Explanation* out) {
  split(
      problem,
      [&](const QuantizedForward& both) {
        Explanation first;
        backend.explain(both.quantize, &first);
        out->add("first", first);
        out->add("FP8 tensors", message(both.tensor_bytes, " bytes of the workspace"));
        backend.explain(both.forward, out);
      },
      [&](const P& p) { backend.explain(p, out); });
}

template <AnyProblem P>
Status launch(const Backend& backend, const P& problem) {
  return split(
      problem,
      [&](const QuantizedForward& both) -> Status {
        FLASH3_CHECK(backend.quantize(both.quantize));
        return backend.forward(both.forward);
      },
      [&](const P& p) { return launch_on(backend, p); });
}

#define FLASH3_DISPATCH(P)                                                  \
  template Status supports(const Backend&, const P&);                       \
  template size_t workspace_size(const Backend&, const P&);                 \
  template void explain(const Backend&, const P&, Explanation*);            \
  template Status launch(const Backend&, const P&);                         \
  template Status check_backend(const P&, flash3_backend, const Backend**); \
  template Status select_backend(const P&, const Backend**);                \
  template Status check_workspace(const P&, const Backend&);
FLASH3_DISPATCH(ForwardProblem)
FLASH3_DISPATCH(BackwardProblem)
FLASH3_DISPATCH(QuantizeProblem)
#undef FLASH3_DISPATCH

const char* backend_name(flash3_backend id) {
  switch (id) {
    case FLASH3_BACKEND_AUTO: return "auto";
    case FLASH3_BACKEND_HOPPER: return "hopper";
    case FLASH3_BACKEND_CPU: return "cpu";
  }
  return "unknown";
}

}  // namespace flash3
