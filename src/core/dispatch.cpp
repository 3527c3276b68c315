// SPDX-License-Identifier: Apache-2.0
// The registry of backends, and the choice of the one that runs a call.
#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/added_checks.hpp"
#include "core/alias_checks.hpp"
#include "core/backend.hpp"
#include "core/kept.hpp"
#include "core/message.hpp"
#include "core/params.hpp"
#include "core/pointers.hpp"
#include "core/quantized_forward.hpp"

namespace flash3 {
namespace {

// ---- plans around the plan of an attention, for what a call also asks for: rows of no token that
// are filled, and the largest logit of each head ----

// The same call, which leaves such rows as they are.
template <HasPadding P>
P without_padding(P problem) {
  problem.fills_padding = false;
  return problem;
}

template <HasPadding P>
class PaddedPlan final : public Plan<P> {
 public:
  // attention: null where the call writes nothing else.
  PaddedPlan(const Backend& backend, PlanPointer<P> attention)
      : backend_(backend), attention_(std::move(attention)) {}

  size_t workspace_bytes() const override { return attention_ ? attention_->workspace_bytes() : 0; }

  void explain(const P& problem, Explanation* out) const override {
    if (attention_) attention_->explain(problem, out);
    out->add("padding", "rows that belong to no token are filled at the end");
  }

  // The rows differ from those of the attention, which checks lengths before it writes anything.
  Status launch(const P& problem) const override {
    if (attention_) FLASH3_CHECK(attention_->launch(without_padding(problem)));
    return backend_.fill_padding(padding_of(problem), problem.stream);
  }

  ScheduleNeeds schedule_needs() const override {
    return attention_ ? attention_->schedule_needs() : ScheduleNeeds{};
  }
  Status make_schedule(const P& problem, void* data) const override {
    return attention_ ? attention_->make_schedule(problem, data) : Status();
  }

 private:
  const Backend& backend_;
  PlanPointer<P> attention_;
};

// The same call, with the largest logits of its rows at the end of the workspace: [head, row].
struct RowMaxima {
  ForwardProblem attention;
  size_t offset = 0;  // into the workspace
  int64_t rows = 0;   // of a head
};

inline RowMaxima row_maxima(const ForwardProblem& problem, size_t workspace_of_attention) {
  RowMaxima made{.attention = problem};
  const Sequences& q = problem.sequences_q;
  const int64_t stride_batch = q.packed ? 0 : q.rows;
  made.rows = q.packed ? q.rows : problem.batch * q.rows;
  made.offset = workspace_of_attention;
  reserve_workspace(0, &made.offset);
  LseView& rows = made.attention.max_logits;
  rows = {nullptr, true, stride_batch, made.rows};
  if (problem.workspace)
    rows.data = reinterpret_cast<float*>(static_cast<char*>(problem.workspace) + made.offset);
  return made;
}

class HeadMaximaPlan final : public Plan<ForwardProblem> {
 public:
  // attention: null where no row exists and nothing is appended.
  HeadMaximaPlan(const Backend& backend, PlanPointer<ForwardProblem> attention)
      : backend_(backend), attention_(std::move(attention)) {}

  size_t workspace_bytes() const override { return bytes_; }
  void measure(const ForwardProblem& problem) {
    const RowMaxima maxima = row_maxima(problem, bytes_of_attention());
    bytes_ = maxima.offset + static_cast<size_t>(maxima.rows * problem.heads_q) * sizeof(float);
  }

  void explain(const ForwardProblem& problem, Explanation* out) const override {
    if (attention_) attention_->explain(problem, out);
    out->add("max_logits", "those of rows, in the workspace, and then the largest of each head");
  }

  Status launch(const ForwardProblem& problem) const override {
    const RowMaxima maxima = row_maxima(problem, bytes_of_attention());
    if (attention_) FLASH3_CHECK(attention_->launch(maxima.attention));
    // Rows of no token are not written.
    const Padding rows = padding_of_max_logits(maxima.attention);
    if (rows.count > 0 && maxima.rows > 0)
      FLASH3_CHECK(backend_.fill_padding(rows, problem.stream));
    return backend_.max_of_rows(maxima.attention.max_logits, maxima.rows, problem.heads_q,
                                problem.max_logits, problem.stream);
  }

  ScheduleNeeds schedule_needs() const override {
    return attention_ ? attention_->schedule_needs() : ScheduleNeeds{};
  }
  Status make_schedule(const ForwardProblem& problem, void* data) const override {
    return attention_ ? attention_->make_schedule(problem, data) : Status();
  }

 private:
  size_t bytes_of_attention() const { return attention_ ? attention_->workspace_bytes() : 0; }

  const Backend& backend_;
  PlanPointer<ForwardProblem> attention_;
  size_t bytes_ = 0;
};

// ---- the choice of a backend ----

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
    if (other != &backend) FLASH3_CHECK(other->owns(address, &owned));
    if (owned) return {};
  }
  return backend.can_access(address, accessible);
}

const char* workspace_function(const ForwardProblem&) { return "flash3_forward_workspace"; }
const char* workspace_function(const BackwardProblem&) { return "flash3_backward_workspace"; }
const char* workspace_function(const QuantizeProblem&) { return "flash3_quantize_workspace"; }
const char* workspace_function(const MergeProblem&) { return "flash3_merge_workspace"; }

template <AnyProblem P>
Status plan_attention_on(const Backend& backend, const P& problem, PlanPointer<P>* plan) {
  if constexpr (std::same_as<P, ForwardProblem>) {
    if (problem.max_logits.of_heads) {
      const ForwardProblem rows = row_maxima(problem, 0).attention;
      PlanPointer<ForwardProblem> planned;
      if (!rows.is_empty()) FLASH3_CHECK(plan_attention_on(backend, rows, &planned));
      auto made = std::make_unique<HeadMaximaPlan>(backend, std::move(planned));
      made->measure(problem);
      *plan = std::move(made);
      return {};
    }
    if (problem.quantizes) return plan_quantized_forward(backend, problem, plan);
  }
  return backend.plan(problem, plan);
}

template <AnyProblem P>
Status plan_on(const Backend& backend, const P& problem, PlanPointer<P>* plan) {
  if (Status memory = check_memory(backend, problem); !memory.ok()) {
    FLASH3_CHECK(backend.available());  // why not, if it is not, comes first
    return memory;
  }
  Status options = check_added_on(problem, backend);
  if (!options.ok()) {
    FLASH3_CHECK(backend.available());
    return options;
  }
  if constexpr (HasPadding<P>)
    if (problem.fills_padding) {
      const P attention = without_padding(problem);
      PlanPointer<P> planned;
      FLASH3_CHECK(attention.is_empty() ? backend.available()
                                        : plan_attention_on(backend, attention, &planned));
      *plan = std::make_unique<PaddedPlan<P>>(backend, std::move(planned));
      return {};
    }
  return plan_attention_on(backend, problem, plan);
}

}  // namespace

Status check_access(const Backend& backend, const char* field, const char* member,
                    const void* address, const char* access) {
  bool accessible = false;
  FLASH3_CHECK(can_access(backend, address, &accessible));
  if (accessible) return {};
  const char* memory = backend.id() == FLASH3_BACKEND_CPU ? "device memory" : "host memory";
  return invalid_argument(message(field, member, " is ", memory, ", which the ", backend.name(),
                                  " backend cannot ", access));
}

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

Status built_in_backend(flash3_backend id, const Backend** backend) {
  if (id == FLASH3_BACKEND_AUTO)
    return invalid_argument("backend = 0 (auto) but it must be 1 (hopper) or 2 (cpu)");
  *backend = find_backend(id);
  return *backend ? Status() : not_built_in(id);
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
Status check_memory(const Backend& backend, const P& problem) {
  return visit_pointers(
      problem, [&](const char* name, auto, const void* address, const char* access) {
        return address ? check_access(backend, name, ".data", address, access) : Status();
      });
}

Status on_backend(flash3_backend id, const char* what,
                  const std::function<Status(const Backend&)>& attempt) {
  if (id != FLASH3_BACKEND_AUTO) {
    const Backend* backend = nullptr;
    FLASH3_CHECK(built_in_backend(id, &backend));
    return attempt(*backend);
  }
  // What every backend calls wrong is wrong; what any of them merely cannot run is unsupported.
  flash3_status code = FLASH3_INVALID_ARGUMENT;
  std::string reasons;
  for (const flash3_backend each : kBestFirst) {
    Status status = on_backend(each, what, attempt);
    if (status.ok()) return {};
    if (status.code() == FLASH3_CUDA_ERROR) return status;  // no other backend makes up for it
    if (status.code() != FLASH3_INVALID_ARGUMENT) code = FLASH3_UNSUPPORTED;
    append(reasons, message("; ", backend_name(each), ": ", status.message()));
  }
  return {code, message("no backend can run this ", what, reasons)};
}

template <AnyProblem P>
Status plan_call(const P& problem, flash3_backend id, PlannedCall<P>* call) {
  *call = {};
  return on_backend(id, "call", [&](const Backend& backend) -> Status {
    FLASH3_CHECK(plan_on(backend, problem, &call->plan));
    call->backend = &backend;
    return {};
  });
}

Status check_scratch(const Backend& backend, const Scratch& scratch, size_t needed,
                     const char* teller) {
  if (needed == 0) return {};
  const auto too_little = [&](const auto&... given) {
    return invalid_argument(
        message(given..., " but this call needs ", needed, " bytes, as ", teller, " tells"));
  };
  if (!scratch.data) return too_little(scratch.data_name, " is null");
  if (scratch.size < needed) return too_little(scratch.size_name, " = ", scratch.size);
  if (reinterpret_cast<uintptr_t>(scratch.data) % kWorkspaceAlignment != 0)
    return invalid_argument(message(scratch.data_name, " = ", hex(scratch.data),
                                    " but it must be a multiple of ", kWorkspaceAlignment));
  return check_access(backend, scratch.data_name, "", scratch.data, "use");
}

template <AnyProblem P>
Status check_workspace(const P& problem, const PlannedCall<P>& call) {
  if constexpr (std::same_as<P, ForwardProblem>) FLASH3_CHECK(check_schedule(problem, call));
  if (!call.plan) return {};
  if constexpr (std::derived_from<P, Problem>) FLASH3_CHECK(check_mask(problem, *call.backend));
  return check_scratch(*call.backend,
                       {"workspace", "workspace_size", problem.workspace, problem.workspace_size},
                       call.plan->workspace_bytes(), workspace_function(problem));
}

template <AnyProblem P, class Params>
Status check_scratch_aliases(const Params* params, const P& problem, const PlannedCall<P>& call) {
  if (!call.plan) return {};
  const size_t workspace = call.plan->workspace_bytes();
  size_t schedule = 0;
  if constexpr (std::same_as<P, ForwardProblem>)
    if (problem.schedule) schedule = call.plan->schedule_needs().bytes;
  size_t mask = 0;
  if constexpr (std::derived_from<P, Problem>)
    if (problem.mask_lists.given)
      mask = mask_bytes(problem.mask_lists.shape, problem.mask_lists.documents);
  if (workspace == 0 && schedule == 0 && mask == 0) return {};
  WholeParams<Params> whole;
  FLASH3_CHECK(whole.read(params));
  CallMemory memory;
  const size_t tensors = add_tensors(*whole, problem, &memory);
  memory.add("workspace", problem.workspace, workspace, true);
  if constexpr (std::same_as<P, ForwardProblem>)
    if (schedule > 0) memory.add("schedule->data", problem.schedule->data, schedule, false);
  if constexpr (std::derived_from<P, Problem>)
    memory.add("mask->data", problem.mask_lists.data, mask, false);
  return memory.check(tensors);
}

template Status check_memory(const Backend&, const ForwardProblem&);
template Status check_memory(const Backend&, const BackwardProblem&);
template Status check_memory(const Backend&, const QuantizeProblem&);
template Status check_memory(const Backend&, const MergeProblem&);
template Status plan_call(const ForwardProblem&, flash3_backend, PlannedCall<ForwardProblem>*);
template Status plan_call(const BackwardProblem&, flash3_backend, PlannedCall<BackwardProblem>*);
template Status plan_call(const QuantizeProblem&, flash3_backend, PlannedCall<QuantizeProblem>*);
template Status plan_call(const MergeProblem&, flash3_backend, PlannedCall<MergeProblem>*);
template Status check_workspace(const ForwardProblem&, const PlannedCall<ForwardProblem>&);
template Status check_workspace(const BackwardProblem&, const PlannedCall<BackwardProblem>&);
template Status check_workspace(const QuantizeProblem&, const PlannedCall<QuantizeProblem>&);
template Status check_workspace(const MergeProblem&, const PlannedCall<MergeProblem>&);
template Status check_scratch_aliases(const flash3_forward_params*, const ForwardProblem&,
                                      const PlannedCall<ForwardProblem>&);
template Status check_scratch_aliases(const flash3_backward_params*, const BackwardProblem&,
                                      const PlannedCall<BackwardProblem>&);
template Status check_scratch_aliases(const flash3_quantize_params*, const QuantizeProblem&,
                                      const PlannedCall<QuantizeProblem>&);
template Status check_scratch_aliases(const flash3_merge_params*, const MergeProblem&,
                                      const PlannedCall<MergeProblem>&);

const char* backend_name(flash3_backend id) {
  switch (id) {
    case FLASH3_BACKEND_AUTO: return "auto";
    case FLASH3_BACKEND_HOPPER: return "hopper";
    case FLASH3_BACKEND_CPU: return "cpu";
  }
  return "unknown";
}

}  // namespace flash3
