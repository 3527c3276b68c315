// SPDX-License-Identifier: Apache-2.0
// The Hopper backend: what core/backend.hpp asks, answered by routes of forward, backward, quantize
// and merge calls, and by the kernel that fills padding.
#include "core/backend.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/route.hpp"
#include "cuda/merge/merge.hpp"
#include "cuda/quantize/plan.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/select.hpp"
#include "cuda/varlen/padding.hpp"

namespace flash3 {
namespace {

using namespace cuda;
using namespace cuda::sm90;

template <class Steps, AnyProblem P>
Status make_route(const P& problem, PlanPointer<P>* plan) {
  Device device;
  FLASH3_CHECK(current_device(&device));
  return Route<P, Steps>::make(problem, device, plan);
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
    return make_route<ForwardSteps>(problem, plan);
  }
  Status plan(const BackwardProblem& problem, PlanPointer<BackwardProblem>* plan) const override {
    return make_route<BackwardPlan>(problem, plan);
  }
  Status plan(const QuantizeProblem& problem, PlanPointer<QuantizeProblem>* plan) const override {
    return make_route<QuantizePlan>(problem, plan);
  }
  Status plan(const MergeProblem& problem, PlanPointer<MergeProblem>* plan) const override {
    return make_route<MergePlan>(problem, plan);
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
