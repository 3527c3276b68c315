// SPDX-License-Identifier: Apache-2.0
// Which kernels, packings and slots give the right answer to a call. plan.cpp takes one of them.
#pragma once

#include <functional>

#include "cuda/sm90/forward/plan.hpp"

namespace flash3::cuda::sm90 {

// Whether there are kernels for q of this dtype.
bool takes(flash3_dtype dtype);

// Whether O is summed up in two levels, if the operands are FP8.
bool sums_in_two_levels(const ForwardProblem& problem);

// Calls visit for each way that gives the right answer (forward_choices).
void for_each_choice(const ForwardProblem& problem,
                     const std::function<void(const ForwardChoice&)>& visit);

}  // namespace flash3::cuda::sm90
