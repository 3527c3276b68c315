// SPDX-License-Identifier: Apache-2.0
// The text of flash3_forward_explain and its siblings.
#pragma once

#include <string>

#include "core/problem.hpp"
#include "core/status.hpp"

namespace flash3 {

// Fails where no backend can run the call.
template <AnyProblem P>
Status explain_call(const P& problem, std::string* text);

}  // namespace flash3
