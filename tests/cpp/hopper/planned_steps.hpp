// SPDX-License-Identifier: Apache-2.0
// Problems by the ids of their cases, and what the Hopper backend plans for them, without a GPU.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/tensors.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/select.hpp"
#include "device/planned_forward.hpp"

namespace flash3::cuda::sm90 {

inline constexpr Device kDevice{0, 132, {9, 0}};  // an H100 or H200

// Forward problems by the ids of their cases, without memory, and what is planned for them.

inline ForwardProblem problem_of(const cases::Case& c) {
  const auto params = cases::make_question(c);
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << to_id(c) << ": " << status.message();
  return problem;
}
inline ForwardProblem problem_of(const std::string& id) { return problem_of(cases::parsed(id)); }

// What the Hopper backend plans for forward calls, without a GPU.

struct PlannedSteps : ForwardSteps {
  size_t workspace_bytes = 0;
};

inline PlannedSteps steps_of(const ForwardProblem& problem) {
  PlannedSteps steps;
  const Status status = plan(problem, kDevice, &steps.workspace_bytes, &steps);
  EXPECT_TRUE(status.ok()) << status.message();
  return steps;
}

// Whether the decode kernels run all of a call, or refuse it, and whether they run some of it.
inline bool is_decode(const ForwardProblem& problem) {
  PlannedSteps steps;
  static_cast<void>(plan(problem, kDevice, &steps.workspace_bytes, &steps));
  return !steps.forward;
}
inline bool is_mixed(const ForwardProblem& problem) {
  const PlannedSteps steps = steps_of(problem);
  return steps.forward && steps.decode;
}

inline std::string explained(const ForwardProblem& problem) {
  Explanation lines;
  explain(problem, steps_of(problem), &lines);
  return lines.text();
}

// A call in decode kernels alone, as if all its sequences had as many queries as the longest.
struct PlannedDecode : DecodePlan {
  size_t workspace_bytes = 0;
};
inline Status plan(const ForwardProblem& problem, const Device& device, PlannedDecode* planned) {
  *planned = {};
  plan_append(problem, &planned->workspace_bytes);
  return plan(problem, device, problem.seq_q, problem.seq_q, &planned->workspace_bytes, planned);
}

// Backward problems by the ids of their cases, and what the Hopper backend plans for them.

inline BackwardProblem backward_problem_of(const std::string& id) {
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

inline PlannedBackward plan_of(const std::string& id) { return plan_of(backward_problem_of(id)); }

}  // namespace flash3::cuda::sm90
