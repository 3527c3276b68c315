// SPDX-License-Identifier: Apache-2.0
// The text of flash3_forward_explain and its siblings.
#pragma once

#include <string>

#include "core/backend.hpp"

namespace flash3 {

// What the call is and what was planned for it; no plan: the call has nothing to write.
template <AnyProblem P>
std::string explain_call(const P& problem, const PlannedCall<P>& call);

// "q with its embedding", "q with its rotation" or both, for what a backend puts into its
// workspace; "" with neither.
std::string describe_transformed_q(const ForwardProblem& problem);

}  // namespace flash3
