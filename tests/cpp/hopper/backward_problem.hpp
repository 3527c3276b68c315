// SPDX-License-Identifier: Apache-2.0
// Backward problems by the ids of their cases, and what the Hopper backend plans for them.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "planned_device.hpp"

namespace flash3::cuda::sm90 {

inline BackwardProblem problem_of(const std::string& id) {
  const auto params = cases::make_backward_question(cases::parsed(id + "/bwd"));
  BackwardProblem problem;
  const Status status = make_backward_problem(&params, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

struct PlannedBackward : BackwardPlan {
  size_t workspace_bytes = 0;
};

inline Status plan(const BackwardProblem& problem, const Device& device, PlannedBackward* planned) {
  *planned = {};
  return plan(problem, device, &planned->workspace_bytes, planned);
}

inline PlannedBackward plan_of(const BackwardProblem& problem) {
  PlannedBackward plan;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

inline PlannedBackward plan_of(const std::string& id) { return plan_of(problem_of(id)); }

}  // namespace flash3::cuda::sm90
