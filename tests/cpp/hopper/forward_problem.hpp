// SPDX-License-Identifier: Apache-2.0
// Forward problems by the ids of their cases, without memory.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "../parsed.hpp"
#include "cases/tensors.hpp"
#include "planned_device.hpp"

namespace flash3::cuda::sm90 {

inline ForwardProblem problem_of(const cases::Case& c) {
  const auto params = cases::make_question(c);
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << to_id(c) << ": " << status.message();
  return problem;
}
inline ForwardProblem problem_of(const std::string& id) { return problem_of(cases::parsed(id)); }

}  // namespace flash3::cuda::sm90
