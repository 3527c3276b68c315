// SPDX-License-Identifier: Apache-2.0
// The C interface: nothing thrown gets past it, and every failure leaves its message
// (flash3_last_error).
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/backend.hpp"
#include "core/explain.hpp"
#include "core/guarded.hpp"
#include "core/interrupt.hpp"
#include "core/kept.hpp"
#include "core/message.hpp"
#include "flash3/limits.h"

namespace flash3 {

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

namespace {

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

Status check_backend_id(flash3_backend id) {
  if (id >= FLASH3_BACKEND_AUTO && id <= FLASH3_BACKEND_CPU) return {};
  return invalid_argument(message("backend = ", static_cast<int32_t>(id),
                                  " but it must be 0 (auto), 1 (hopper) or 2 (cpu)"));
}

// ---- the four functions that each kind of call has ----

template <AnyProblem P, class Params>
flash3_status answer_supported(const Params* params) {
  return guarded([&] {
    P problem;
    PlannedCall<P> call;
    return plan_params(params, Pointers::kOptional, &problem, &call);
  });
}

template <AnyProblem P, class Params>
flash3_status answer_workspace(const Params* params, size_t* bytes) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(bytes, "bytes"));
    P problem;
    PlannedCall<P> call;
    FLASH3_CHECK(plan_params(params, Pointers::kOptional, &problem, &call));
    *bytes = call.plan ? call.plan->workspace_bytes() : 0;
    return {};
  });
}

// take_workspace(problem, call): sets the problem's workspace, where that is not the params'.
template <AnyProblem P, class Params, class TakeWorkspace>
Status run_now(const Params* params, const TakeWorkspace& take_workspace) {
  P problem;
  PlannedCall<P> call;
  FLASH3_CHECK(plan_params(params, Pointers::kRequired, &problem, &call));
  FLASH3_CHECK(take_workspace(problem, call));
  FLASH3_CHECK(check_workspace(problem, call));
  FLASH3_CHECK(check_scratch_aliases(params, problem, call));
  return call.plan ? call.plan->launch(problem) : Status();
}

template <AnyProblem P, class Params>
flash3_status run(const Params* params) {
  return guarded(
      [&] { return run_now<P>(params, [](P&, const PlannedCall<P>&) { return Status(); }); });
}

template <AnyProblem P, class Params>
flash3_status run_allocating(const Params* params, flash3_workspace_function allocate,
                             void* context) {
  return guarded([&]() -> Status {
    if (!allocate) return invalid_argument("allocate is null; it must be what gives a workspace");
    return run_now<P>(params, [&](P& problem, const PlannedCall<P>& call) -> Status {
      problem.workspace = nullptr;
      problem.workspace_size = call.plan ? call.plan->workspace_bytes() : 0;
      if (problem.workspace_size == 0) return {};
      problem.workspace = allocate(problem.workspace_size, context);
      if (problem.workspace) return {};
      return {FLASH3_OUT_OF_MEMORY,
              message("allocate gave no workspace of ", problem.workspace_size, " bytes")};
    });
  });
}

template <AnyProblem P, class Params>
flash3_status answer_explain(const Params* params, char* buffer, size_t* size) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(size, "size"));
    P problem;
    PlannedCall<P> call;
    FLASH3_CHECK(plan_params(params, Pointers::kOptional, &problem, &call));
    return give_text(explain_call(problem, call), buffer, size);
  });
}

// ---- plans that the caller keeps ----

template <AnyProblem P, class Params>
flash3_status make_plan(const Params* params, flash3_plan** plan) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(plan, "plan"));
    *plan = nullptr;
    std::unique_ptr<flash3_plan> made;
    FLASH3_CHECK(KeptPlan<P>::make(params, &made));
    *plan = made.release();
    return {};
  });
}

Status check_plan(const flash3_plan* plan) {
  return plan ? Status() : invalid_argument("plan is null; it must be one that was made");
}

template <AnyProblem P, class Params>
flash3_status run_plan(const flash3_plan* plan, const Params* params) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_plan(plan));
    if (typeid(*plan) != typeid(KeptPlan<P>))
      return invalid_argument(
          message("plan is of a ", plan->kind(), " call but it must be of a ", kKind<P>, " call"));
    return static_cast<const KeptPlan<P>*>(plan)->run(params);
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

flash3_status flash3_quantize_supported(const flash3_quantize_params* params) {
  return flash3::answer_supported<flash3::QuantizeProblem>(params);
}

flash3_status flash3_quantize_workspace(const flash3_quantize_params* params, size_t* bytes) {
  return flash3::answer_workspace<flash3::QuantizeProblem>(params, bytes);
}

flash3_status flash3_quantize(const flash3_quantize_params* params) {
  return flash3::run<flash3::QuantizeProblem>(params);
}

flash3_status flash3_quantize_explain(const flash3_quantize_params* params, char* buffer,
                                      size_t* size) {
  return flash3::answer_explain<flash3::QuantizeProblem>(params, buffer, size);
}

flash3_status flash3_merge_supported(const flash3_merge_params* params) {
  return flash3::answer_supported<flash3::MergeProblem>(params);
}

flash3_status flash3_merge_workspace(const flash3_merge_params* params, size_t* bytes) {
  return flash3::answer_workspace<flash3::MergeProblem>(params, bytes);
}

flash3_status flash3_merge(const flash3_merge_params* params) {
  return flash3::run<flash3::MergeProblem>(params);
}

flash3_status flash3_merge_explain(const flash3_merge_params* params, char* buffer, size_t* size) {
  return flash3::answer_explain<flash3::MergeProblem>(params, buffer, size);
}

flash3_status flash3_forward_plan(const flash3_forward_params* params, flash3_plan** plan) {
  return flash3::make_plan<flash3::ForwardProblem>(params, plan);
}

flash3_status flash3_backward_plan(const flash3_backward_params* params, flash3_plan** plan) {
  return flash3::make_plan<flash3::BackwardProblem>(params, plan);
}

flash3_status flash3_quantize_plan(const flash3_quantize_params* params, flash3_plan** plan) {
  return flash3::make_plan<flash3::QuantizeProblem>(params, plan);
}

flash3_status flash3_merge_plan(const flash3_merge_params* params, flash3_plan** plan) {
  return flash3::make_plan<flash3::MergeProblem>(params, plan);
}

flash3_status flash3_forward_run(const flash3_plan* plan, const flash3_forward_params* params) {
  return flash3::run_plan<flash3::ForwardProblem>(plan, params);
}

flash3_status flash3_backward_run(const flash3_plan* plan, const flash3_backward_params* params) {
  return flash3::run_plan<flash3::BackwardProblem>(plan, params);
}

flash3_status flash3_quantize_run(const flash3_plan* plan, const flash3_quantize_params* params) {
  return flash3::run_plan<flash3::QuantizeProblem>(plan, params);
}

flash3_status flash3_merge_run(const flash3_plan* plan, const flash3_merge_params* params) {
  return flash3::run_plan<flash3::MergeProblem>(plan, params);
}

flash3_status flash3_forward_allocating(const flash3_forward_params* params,
                                        flash3_workspace_function allocate, void* context) {
  return flash3::run_allocating<flash3::ForwardProblem>(params, allocate, context);
}

flash3_status flash3_backward_allocating(const flash3_backward_params* params,
                                         flash3_workspace_function allocate, void* context) {
  return flash3::run_allocating<flash3::BackwardProblem>(params, allocate, context);
}

flash3_status flash3_quantize_allocating(const flash3_quantize_params* params,
                                         flash3_workspace_function allocate, void* context) {
  return flash3::run_allocating<flash3::QuantizeProblem>(params, allocate, context);
}

flash3_status flash3_merge_allocating(const flash3_merge_params* params,
                                      flash3_workspace_function allocate, void* context) {
  return flash3::run_allocating<flash3::MergeProblem>(params, allocate, context);
}

flash3_status flash3_plan_workspace(const flash3_plan* plan, size_t* bytes) {
  return flash3::guarded([&]() -> flash3::Status {
    FLASH3_CHECK(flash3::check_plan(plan));
    FLASH3_CHECK(flash3::check_result(bytes, "bytes"));
    *bytes = plan->workspace_bytes();
    return {};
  });
}

flash3_status flash3_plan_explain(const flash3_plan* plan, char* buffer, size_t* size) {
  return flash3::guarded([&]() -> flash3::Status {
    FLASH3_CHECK(flash3::check_plan(plan));
    FLASH3_CHECK(flash3::check_result(size, "size"));
    return flash3::give_text(plan->explain(), buffer, size);
  });
}

void flash3_plan_destroy(flash3_plan* plan) { delete plan; }

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

flash3_status flash3_backend_head_dims(flash3_backend id, flash3_head_dims_of calls,
                                       int32_t* head_dim, int32_t* head_dim_v) {
  return flash3::guarded([&]() -> flash3::Status {
    FLASH3_CHECK(flash3::check_result(head_dim, "head_dim"));
    FLASH3_CHECK(flash3::check_result(head_dim_v, "head_dim_v"));
    if (calls < FLASH3_HEAD_DIMS_OF_FORWARD || calls > FLASH3_HEAD_DIMS_OF_BACKWARD)
      return flash3::invalid_argument(
          flash3::message("calls = ", static_cast<int32_t>(calls),
                          " but it must be 0 (forward), 1 (forward in FP8) ", "or 2 (backward)"));
    const flash3::Backend* backend = nullptr;
    FLASH3_CHECK(flash3::check_backend_id(id));
    FLASH3_CHECK(flash3::built_in_backend(id, &backend));
    const flash3::DimLimits most = backend->head_dims(calls);
    *head_dim = static_cast<int32_t>(most.qk), *head_dim_v = static_cast<int32_t>(most.v);
    return {};
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
    case FLASH3_CANCELLED: return "cancelled";
  }
  return "unknown";
}

void flash3_set_interrupt(flash3_interrupt_function function) {
  flash3::interrupt_function().store(function);
}

const char* flash3_last_error(void) {
  const flash3::LastError& error = flash3::last_error();
  return error.fixed ? error.fixed : error.text.c_str();
}

const char* flash3_version(void) { return FLASH3_VERSION_STRING; }
