// SPDX-License-Identifier: Apache-2.0
// The Hopper backend: what core/backend.hpp asks, answered by the plans of forward, decode, mixed,
// backward, quantize and merge, and by the kernel that fills padding.
#include <memory>
#include <utility>

#include "core/backend.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/merge/merge.hpp"
#include "cuda/quantize/plan.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/decode/latent/plan.hpp"
#include "cuda/sm90/decode/plan.hpp"
#include "cuda/sm90/forward/plan.hpp"
#include "cuda/sm90/mixed/plan.hpp"
#include "cuda/varlen/padding.hpp"

namespace flash3 {
namespace {

using namespace cuda;
using namespace cuda::sm90;

// What a kernel family has decided for the device that was current then. Each family has the
// functions plan, explain and launch for its kind of problem.
template <AnyProblem P, class Decisions>
class HopperPlan final : public Plan<P> {
 public:
  Status init(const P& problem) {
    FLASH3_CHECK(current_device(&device_));
    using cuda::plan, sm90::plan;
    return plan(problem, device_, &decisions_);
  }

  size_t workspace_bytes() const override { return decisions_.workspace_bytes; }
  void explain(const P& problem, Explanation* out) const override {
    using cuda::explain, sm90::explain;
    explain(problem, decisions_, out);
  }
  Status launch(const P& problem) const override {
    FLASH3_CHECK(check_is_current(device_));
    using cuda::launch, sm90::launch;
    return launch(problem, decisions_);
  }

  ScheduleNeeds schedule_needs() const override {
    if constexpr (kHasSchedule) return sm90::schedule_needs(decisions_);
    return {};
  }
  Status make_schedule(const P& problem, void* data) const override {
    FLASH3_CHECK(check_is_current(device_));
    if constexpr (kHasSchedule) return sm90::make_schedule(problem, decisions_, data);
    return {};
  }

 private:
  static constexpr bool kHasSchedule =
      requires(const Decisions& decisions) { sm90::schedule_needs(decisions); };

  Device device_;
  Decisions decisions_;
};

template <class Decisions, AnyProblem P>
Status make_plan(const P& problem, PlanPointer<P>* plan) {
  auto made = std::make_unique<HopperPlan<P, Decisions>>();
  FLASH3_CHECK(made->init(problem));
  *plan = std::move(made);
  return {};
}

class HopperBackend final : public Backend {
 public:
  flash3_backend id() const override { return FLASH3_BACKEND_HOPPER; }
  const char* name() const override { return "hopper"; }

  Status available() const override {
    Device device;
    return current_device(&device);
  }

  std::string describe() const override {
    Device device;
    const Status status = current_device(&device);
    return status.ok() ? device_name(device) : status.message();
  }

  Status can_access(const void* address, bool* accessible) const override {
    return is_device_memory(address, accessible);
  }

  Status owns(const void* address, bool* owned) const override {
    return is_device_only_memory(address, owned);
  }

  // Of wide heads it has latent attention's alone: check_latent().
  DimLimits head_dims(flash3_head_dims_of) const override { return {kMaxHeadDim, kMaxHeadDim}; }

  Status plan(const ForwardProblem& problem, PlanPointer<ForwardProblem>* plan) const override {
    FLASH3_CHECK(check_latent(problem));
    if (is_decode(problem)) return make_plan<DecodePlan>(problem, plan);
    if (is_mixed(problem)) return make_plan<MixedPlan>(problem, plan);
    return make_plan<ForwardPlan>(problem, plan);
  }
  Status plan(const BackwardProblem& problem, PlanPointer<BackwardProblem>* plan) const override {
    return make_plan<BackwardPlan>(problem, plan);
  }
  Status plan(const QuantizeProblem& problem, PlanPointer<QuantizeProblem>* plan) const override {
    return make_plan<QuantizePlan>(problem, plan);
  }
  Status plan(const MergeProblem& problem, PlanPointer<MergeProblem>* plan) const override {
    return make_plan<MergePlan>(problem, plan);
  }

  Status fill_padding(const Padding& padding, void* stream) const override {
    return launch_fill_padding(padding, stream);
  }
};

}  // namespace

const Backend& hopper_backend() {
  static const HopperBackend backend;
  return backend;
}

}  // namespace flash3
