// SPDX-License-Identifier: Apache-2.0
// Cases by their ids.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "cases/case.hpp"

namespace flash3::cases {

inline Case parsed(const std::string& id) {
  std::string error;
  const auto c = parse_id(id, &error);
  EXPECT_TRUE(c.has_value()) << error;
  return c.value_or(Case{});
}

}  // namespace flash3::cases
