// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/family.hpp"

#include "cuda/host/route.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/select.hpp"

namespace flash3::cuda::sm90 {

const Family& family() {
  static constexpr Family kHopper = {
      .needs = "9.0",
      // WGMMA is of this capability alone.
      .takes = [](const Capability& c) { return c == Capability{9, 0}; },
      .forward = Route<ForwardProblem, ForwardSteps>::make,
      .backward = Route<BackwardProblem, BackwardPlan>::make,
  };
  return kHopper;
}

}  // namespace flash3::cuda::sm90
