// SPDX-License-Identifier: Apache-2.0
// Enqueues a planned forward call on the problem's stream: the copies that the plan asks for, then
// the kernel.
#pragma once

#include "hopper/forward/select.hpp"

namespace flash3::hopper {

Status launch_forward(const ForwardProblem& problem, const ForwardPlan& plan);

}  // namespace flash3::hopper
