// SPDX-License-Identifier: Apache-2.0
// The GPU backend: what core/backend.hpp asks. The kernels for attention are those of the family
// that takes the current device; memory and the other kernels are any GPU's. This file alone knows
// which families there are. Until there is another than Hopper's, users call the backend `hopper`.
#include <array>

#include "core/backend.hpp"
#include "cuda/dropout/dropout_mask.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/family.hpp"
#include "cuda/host/route.hpp"
#include "cuda/mask/make_mask.hpp"
#include "cuda/memory.hpp"
#include "cuda/merge/merge.hpp"
#include "cuda/quantize/plan.hpp"
#include "cuda/sm90/family.hpp"
#include "cuda/varlen/padding.hpp"

namespace flash3 {
namespace {

using namespace cuda;

// Calls the function with the family whose kernels run on the current device, and the device.
template <class Function>
Status choose(const Function& function) {
  static const std::array families = {&sm90::family()};
  Device device;
  const Family* family = nullptr;
  FLASH3_CHECK(current_device(&device));
  FLASH3_CHECK(find_family(families, device, &family));
  return function(*family, device);
}

class CudaBackend final : public Backend {
 public:
  flash3_backend id() const override { return FLASH3_BACKEND_HOPPER; }
  const char* name() const override { return "hopper"; }

  Status available() const override {
    return choose([](const Family&, const Device&) { return Status(); });
  }

  std::string describe() const override {
    std::string name;
    const Status status = choose([&](const Family&, const Device& device) {
      name = device_name(device);
      return Status();
    });
    return status.ok() ? name : status.message();
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
    return choose([&](const Family& f, const Device& d) { return f.forward(problem, d, plan); });
  }
  Status plan(const BackwardProblem& problem, PlanPointer<BackwardProblem>* plan) const override {
    return choose([&](const Family& f, const Device& d) { return f.backward(problem, d, plan); });
  }
  Status plan(const QuantizeProblem& problem, PlanPointer<QuantizeProblem>* plan) const override {
    return choose([&](const Family&, const Device& d) {
      return Route<QuantizeProblem, QuantizePlan>::make(problem, d, plan);
    });
  }
  Status plan(const MergeProblem& problem, PlanPointer<MergeProblem>* plan) const override {
    return choose([&](const Family&, const Device& d) {
      return Route<MergeProblem, MergePlan>::make(problem, d, plan);
    });
  }

  Status device(uint64_t* number) const override {
    Device device;
    FLASH3_CHECK(current_device(&device));
    *number = static_cast<uint64_t>(device.index);
    return {};
  }
  Status make_mask(const MaskProblem& problem) const override { return launch_make_mask(problem); }
  Status read_mask_counts(const MaskShape& shape, const void* data, void* stream,
                          MaskCounts* counts) const override {
    return cuda::read_mask_counts(shape, data, stream, counts);
  }

  Status make_dropout_mask(const DropoutMaskProblem& problem) const override {
    return launch_dropout_mask(problem);
  }

  Status max_of_rows(const LseView& rows, int64_t count, int64_t heads, const LseView& out,
                     void* stream) const override {
    return launch_max_of_rows(rows, count, heads, out, stream);
  }
  Status fill_padding(const Padding& padding, void* stream) const override {
    return launch_fill_padding(padding, stream);
  }
};

}  // namespace

const Backend& hopper_backend() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace flash3
