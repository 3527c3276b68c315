// Runs one case through the C interface and judges it against the oracle.
#pragma once

#include "cases/judge.hpp"
#include "cases/memory.hpp"

namespace flash3::cases {

struct RunOptions {
  flash3_backend backend = FLASH3_BACKEND_CPU;
  int repeat = 1;          // calls; all must give the same bits, but for backward ones that are not
                           // deterministic: each of these is judged
  int oracle_threads = 1;  // 0: all cores
  int num_threads = 1;     // of the CPU backend
};

// Thread-safe for different memories. Throws only what Memory throws (device failures).
Verdict run_case(const Case& c, Memory& memory, const RunOptions& options);

// What run_case does with a backward case.
Verdict run_backward_case(const Case& c, Memory& memory, const RunOptions& options);

}  // namespace flash3::cases
