// SPDX-License-Identifier: Apache-2.0
// What a valid forward call becomes, for tests of what it then means.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/problem.hpp"
#include "flash3/flash3.hpp"

namespace flash3::test {

inline ForwardProblem problem_of(const Forward& args, Pointers pointers = Pointers::kRequired) {
  const auto p = args.params();
  ForwardProblem problem;
  const Status status = make_forward_problem(&p, pointers, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

// What is said of the index tensors of the call; "" if nothing.
inline std::string lengths_message(const Forward& args) {
  const Status status = check_lengths(problem_of(args));
  EXPECT_EQ(status.code(), status.ok() ? FLASH3_OK : FLASH3_INVALID_ARGUMENT);
  return status.message();
}

}  // namespace flash3::test
