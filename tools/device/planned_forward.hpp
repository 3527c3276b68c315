// SPDX-License-Identifier: Apache-2.0
// A forward call in forward kernels alone, whatever kernels the library would choose for it: for
// tests and measurements of what they plan and how fast they are.
#pragma once

#include "cuda/append/append.hpp"
#include "cuda/sm90/family.hpp"
#include "cuda/sm90/forward/plan.hpp"

namespace flash3::cuda::sm90 {

// The current device, if these kernels run on it.
inline Status current_hopper(Device* device) {
  const Family* const families[] = {&family()};
  const Family* found = nullptr;
  FLASH3_CHECK(current_device(device));
  return find_family(families, *device, &found);
}

struct PlannedForward : ForwardPlan {
  AppendPlan append;
  size_t workspace_bytes = 0;
};

inline Status plan_choice(const ForwardProblem& problem, const Device& device,
                          const ForwardChoice& choice, PlannedForward* planned) {
  *planned = {};
  planned->append = plan_append(problem, &planned->workspace_bytes);
  return plan_choice(problem, transformed_q(problem, planned->append), device, choice,
                     &planned->workspace_bytes, planned);
}

// The choice that is expected to be the fastest.
inline Status plan(const ForwardProblem& problem, const Device& device, PlannedForward* planned) {
  *planned = {};
  planned->append = plan_append(problem, &planned->workspace_bytes);
  return plan(problem, transformed_q(problem, planned->append), device,
              best_choices(problem, device.multiprocessors), &planned->workspace_bytes, planned);
}

// On the current device.
inline Status launch(const ForwardProblem& problem, const PlannedForward& planned,
                     const Device& device) {
  Launches launches;
  prepare_append(problem, planned.append, &launches);
  FLASH3_CHECK(prepare(problem, transformed_q(problem, planned.append), planned, &launches));
  return launches.enqueue(device.index, problem.stream);
}

}  // namespace flash3::cuda::sm90
