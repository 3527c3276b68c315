// SPDX-License-Identifier: Apache-2.0
// The GPU backend: what core/backend.hpp asks. The kernels for attention are those of the family
// that takes the current device; memory and the other kernels are any GPU's. This file alone knows
// which families there are. Until there is another than Hopper's, users call the backend `hopper`.
#include <array>

#include "core/backend.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/family.hpp"
#include "cuda/host/route.hpp"
#include "cuda/memory.hpp"
#include "cuda/merge/merge.hpp"
#include "cuda/quantize/plan.hpp"
#include "cuda/sm90/family.hpp"
#include "cuda/varlen/padding.hpp"

namespace flash3 {
namespace {

using namespace cuda;

// The current device, and the family whose kernels run on it.
Status find_device(Device* device, const Family** family) {
  static const std::array families = {&sm90::family()};
  FLASH3_CHECK(current_device(device));
  return find_family(families, *device, family);
}

class CudaBackend final : public Backend {
 public:
  flash3_backend id() const override { return FLASH3_BACKEND_HOPPER; }
  const char* name() const override { return "hopper"; }

  Status available() const override {
    Device device;
    const Family* family = nullptr;
    return find_device(&device, &family);
  }

  std::string describe() const override {
    Device device;
    const Family* family = nullptr;
    const Status status = find_device(&device, &family);
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
    return choose(&Family::forward, problem, plan);
  }
  Status plan(const BackwardProblem& problem, PlanPointer<BackwardProblem>* plan) const override {
    return choose(&Family::backward, problem, plan);
  }
  Status plan(const QuantizeProblem& problem, PlanPointer<QuantizeProblem>* plan) const override {
    return choose_any<QuantizePlan>(problem, plan);
  }
  Status plan(const MergeProblem& problem, PlanPointer<MergeProblem>* plan) const override {
    return choose_any<MergePlan>(problem, plan);
  }

  Status fill_padding(const Padding& padding, void* stream) const override {
    return launch_fill_padding(padding, stream);
  }

 private:
  // What the device's family has for the problem.
  template <class Member, AnyProblem P>
  static Status choose(Member member, const P& problem, PlanPointer<P>* plan) {
    Device device;
    const Family* family = nullptr;
    FLASH3_CHECK(find_device(&device, &family));
    return (family->*member)(problem, device, plan);
  }
  // What all families have.
  template <class Steps, AnyProblem P>
  static Status choose_any(const P& problem, PlanPointer<P>* plan) {
    Device device;
    const Family* family = nullptr;
    FLASH3_CHECK(find_device(&device, &family));
    return Route<P, Steps>::make(problem, device, plan);
  }
};

}  // namespace

const Backend& hopper_backend() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace flash3
