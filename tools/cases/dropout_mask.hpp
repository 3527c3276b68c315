// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "cases/case.hpp"
#include "cases/memory.hpp"
#include "cases/runner.hpp"

namespace flash3::cases {

// Whether flash3_dropout_mask writes which weights the case's dropout keeps, of a few of its
// sequences, heads, queries and keys: what went wrong, "" if nothing.
std::string check_dropout_mask(const Case& c, Memory& memory, const RunOptions& options);

}  // namespace flash3::cases
