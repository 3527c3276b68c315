// SPDX-License-Identifier: Apache-2.0
// Runs one case through the C interface and checks it against the oracle.
#pragma once

#include <string>
#include <vector>

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

// A case of flash3_quantize. Where nothing is rotated, scales and codes must be those of the
// reference bit for bit. Where rotary embeddings or the rotation come first, their float32 sums may
// be those of any order: a code may err by half a step and a little, and a scale be its neighbour
// where the largest element lies at its limit.

// What run_case does with it. The checks of q, k and v hold the largest error beside the largest
// size that the scale is for.
CheckResult run_quantize_case(const Case& c, Memory& memory, const RunOptions& options);

// The call of such a case without data, for questions.
flash3_quantize_params make_quantize_question(const Case& c);

// flash3_merge on any backend, against the formula of flash3.h in float64.

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

// Whether flash3_dropout_mask writes which weights the case's dropout keeps, of a few of its
// sequences, heads, queries and keys: what went wrong, "" if nothing.
std::string check_dropout_mask(const Case& c, Memory& memory, const RunOptions& options);

}  // namespace flash3::cases
