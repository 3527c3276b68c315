// SPDX-License-Identifier: Apache-2.0
// How a call runs on the GPU: the steps that it takes, chosen once for a problem and a device.
#pragma once

#include <memory>
#include <utility>

#include "core/plan.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"

namespace flash3::cuda {

// What a Route finds by argument-dependent lookup, which its own member of the name would hide.
inline constexpr auto explain_steps = [](const auto& problem, const auto& steps, Explanation* out) {
  explain(problem, steps, out);
};

// Steps: a value that one function has chosen. These functions are known for it:
//   plan(problem, device, size_t* workspace, Steps*)   chooses, and says why none can run the call;
//                                                      each step adds its pieces to the workspace
//   explain(problem, steps, Explanation*)
//   prepare(problem, steps, Launches*)                 all that the call enqueues, in order
// and where the call has a list of work that the caller may keep
//   needs_of(steps), prepare_schedule(problem, steps, void* data, Launches*)
template <AnyProblem P, class Steps>
class Route final : public Plan<P> {
 public:
  static Status make(const P& problem, const Device& device, PlanPointer<P>* made) {
    auto route = std::make_unique<Route>();
    route->device_ = device;
    FLASH3_CHECK(plan(problem, device, &route->workspace_bytes_, &route->steps_));
    *made = std::move(route);
    return {};
  }

  size_t workspace_bytes() const override { return workspace_bytes_; }
  void explain(const P& problem, Explanation* out) const override {
    explain_steps(problem, steps_, out);
  }
  Status launch(const P& problem) const override {
    FLASH3_CHECK(check_is_current(device_));
    Launches launches;
    FLASH3_CHECK(prepare(problem, steps_, &launches));
    return launches.enqueue(device_.index, problem.stream);
  }

  ScheduleNeeds schedule_needs() const override {
    if constexpr (kHasSchedule) return needs_of(steps_);
    return {};
  }
  Status make_schedule(const P& problem, void* data) const override {
    FLASH3_CHECK(check_is_current(device_));
    if constexpr (kHasSchedule) {
      Launches launches;
      prepare_schedule(problem, steps_, data, &launches);
      return launches.enqueue(device_.index, problem.stream);
    }
    return {};
  }

 private:
  static constexpr bool kHasSchedule = requires(const Steps& steps) { needs_of(steps); };

  Device device_;
  size_t workspace_bytes_ = 0;
  Steps steps_;
};

}  // namespace flash3::cuda
