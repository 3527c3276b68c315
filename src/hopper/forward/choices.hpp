// SPDX-License-Identifier: Apache-2.0
// Which kernels, packings and slots give the right answer to a call. plan.cpp takes one of them.
#pragma once

#include <functional>

#include "hopper/forward/plan.hpp"

namespace flash3::hopper {

// The element type of the kernels that take this dtype; false: none do.
bool element_of(flash3_dtype dtype, Element* element);

// Whether O is summed up in two levels, if the operands are FP8.
bool sums_in_two_levels(const ForwardProblem& problem);

// Calls visit for each way that gives the right answer (forward_choices).
void for_each_choice(const ForwardProblem& problem,
                     const std::function<void(const ForwardChoice&)>& visit);

}  // namespace flash3::hopper
