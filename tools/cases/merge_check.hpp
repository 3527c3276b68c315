// SPDX-License-Identifier: Apache-2.0
// flash3_merge on any backend, against the formula of flash3.h in float64.
#pragma once

#include <string>
#include <vector>

#include "cases/memory.hpp"

namespace flash3::cases {

struct MergeCase {
  int64_t parts = 3, rows = 5, heads = 4, dim = 40;
  flash3_dtype dtype = FLASH3_FLOAT32;  // of the result
  bool sink = false, lse = true;
  bool odd = false;  // parts and result begin off 16 bytes, rows have gaps
};

std::string to_text(const MergeCase& c);

std::vector<MergeCase> merge_case_table();

// What is wrong; "" if nothing. Parts of rows that saw no key hold NaN, and nothing else may be
// written than the result.
std::string check_merge(const MergeCase& c, Memory& memory, flash3_backend backend);

}  // namespace flash3::cases
