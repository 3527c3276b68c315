// SPDX-License-Identifier: Apache-2.0
// Runs one case through the C interface and checks it against the oracle.
#pragma once

#include "cases/check.hpp"
#include "cases/memory.hpp"

namespace flash3::cases {

struct RunOptions {
  flash3_backend backend = FLASH3_BACKEND_CPU;
  int repeat = 1;          // calls; all must give the same bits, but for backward ones that are not
                           // deterministic: each of these is checked
  int oracle_threads = 1;  // 0: all cores
  int num_threads = 1;     // of the CPU backend
  bool naive = false;      // measure the plain implementation too, where that is not needed anyway
};

// Thread-safe for different memories. Throws only what Memory throws (device failures).
CheckResult run_case(const Case& c, Memory& memory, const RunOptions& options);

// What run_case does with a backward case.
CheckResult run_backward_case(const Case& c, Memory& memory, const RunOptions& options);

}  // namespace flash3::cases
