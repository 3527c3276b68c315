// SPDX-License-Identifier: Apache-2.0
#include "core/kept_plan.hpp"

#include <cstdint>
#include <memory>
#include <utility>

#include "core/explain.hpp"
#include "core/message.hpp"
#include "core/params.hpp"
#include "core/pointers.hpp"
#include "core/tensor_checks.hpp"

namespace flash3 {
namespace {

Status differs(const std::string& field, const auto& planned, const auto& given) {
  return invalid_argument(message(field, " = ", given, " but the plan was made for ", planned,
                                  "; only addresses, stream and workspace may change"));
}

Status check_same_form(const char* name, const flash3_tensor& planned, const flash3_tensor& given) {
  if (given.dtype != planned.dtype)
    return differs(message(name, ".dtype"), dtype_name(planned.dtype), dtype_name(given.dtype));
  if (given.ndim != planned.ndim) return differs(message(name, ".ndim"), planned.ndim, given.ndim);
  for (int d = 0; d < planned.ndim; ++d) {
    const auto part = [&](const char* of) { return message(name, of, "[", d, "]"); };
    if (given.shape[d] != planned.shape[d])
      return differs(part(".shape"), planned.shape[d], given.shape[d]);
    if (given.stride[d] != planned.stride[d])
      return differs(part(".stride"), planned.stride[d], given.stride[d]);
  }
  return {};
}

// Copies by TMA and wide loads are planned by where addresses lie in 16 bytes.
Status check_alignment(const char* name, const void* planned, const void* given) {
  constexpr uintptr_t kAlignment = 16;
  const auto aligned = [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % kAlignment == 0;
  };
  if (aligned(given) || !aligned(planned)) return {};
  return invalid_argument(message(name, ".data = ", hex(given),
                                  " but the plan was made for a multiple of ", kAlignment));
}

}  // namespace

template <AnyProblem P>
Status KeptPlan<P>::make(const Params* params, std::unique_ptr<flash3_plan>* plan) {
  auto made = std::make_unique<KeptPlan>();
  FLASH3_CHECK(read_params(params, &made->params_));
  made->params_.struct_size = sizeof made->params_;
  FLASH3_CHECK(plan_params(&made->params_, Pointers::kOptional, &made->problem_, &made->call_));
  *plan = std::move(made);
  return {};
}

template <AnyProblem P>
size_t KeptPlan<P>::workspace_bytes() const {
  return call_.plan ? call_.plan->workspace_bytes() : 0;
}

template <AnyProblem P>
std::string KeptPlan<P>::explain() const {
  return explain_call(problem_, call_);
}

template <AnyProblem P>
Status KeptPlan<P>::run(const Params* params) const {
  Params given;
  FLASH3_CHECK(read_params(params, &given));
  P problem = problem_;
  FLASH3_CHECK(take_addresses(given, &problem));
  FLASH3_CHECK(visit_options(params_, given, [](const char* name, auto planned, auto now) {
    return planned == now ? Status() : differs(name, planned, now);
  }));
  problem.stream = given.stream;
  problem.workspace = given.workspace;
  problem.workspace_size = given.workspace_size;
  if constexpr (std::same_as<P, ForwardProblem>) problem.schedule = given.schedule;
  if (call_.plan) FLASH3_CHECK(check_memory(*call_.backend, problem));
  FLASH3_CHECK(check_workspace(problem, call_));
  return call_.plan ? call_.plan->launch(problem) : Status();
}

template <AnyProblem P>
Status KeptPlan<P>::take_addresses(const Params& given, P* problem) const {
  return visit_pointers(
      *problem, [&](const char* name, auto member, auto*& pointer, const char*) -> Status {
        const flash3_tensor &planned = params_.*member, &now = given.*member;
        FLASH3_CHECK(check_same_form(name, planned, now));
        if (!is_given(now)) return {};
        FLASH3_CHECK(check_data({name, "", now.ndim, now}, Pointers::kRequired));
        FLASH3_CHECK(check_alignment(name, planned.data, now.data));
        pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(now.data);
        return {};
      });
}

template class KeptPlan<ForwardProblem>;
template class KeptPlan<BackwardProblem>;
template class KeptPlan<QuantizeProblem>;
template class KeptPlan<MergeProblem>;

}  // namespace flash3
