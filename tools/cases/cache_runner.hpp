// SPDX-License-Identifier: Apache-2.0
// A case on a KV cache. out and lse are held to the oracle's bounds, as of any forward; what the
// cache holds afterwards must be the reference's bit for bit, and so every row that nothing is
// appended to is as it was.
#pragma once

#include "cases/runner.hpp"

namespace flash3::cases {

// What run_case does with it.
CheckResult run_cache_case(const Case& c, Memory& memory, const RunOptions& options);

}  // namespace flash3::cases
