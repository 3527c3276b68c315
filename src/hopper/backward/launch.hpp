// SPDX-License-Identifier: Apache-2.0
// Enqueues a planned backward call on the problem's stream: the copies that the plan asks for,
// preprocessing, the main kernel, and dQ's conversion.
#pragma once

#include "hopper/backward/select.hpp"

namespace flash3::hopper {

Status launch_backward(const BackwardProblem& problem, const BackwardPlan& plan);

}  // namespace flash3::hopper
