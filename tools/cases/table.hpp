// SPDX-License-Identifier: Apache-2.0
// The case table: what `flash3 verify` and the test suites run. Deterministic.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cases/case.hpp"

namespace flash3::cases {

enum class Level {
  kQuick,  // "quick": every head dim, mask, layout and head ratio, sequences up to 300
  kFull,   // "full": all pairs of the sequence lengths 0 … 4097 too, for every kind of mask
};

std::optional<Level> parse_level(std::string_view name);

// The dtypes that a backend takes.
std::span<const flash3_dtype> dtypes_of(flash3_backend backend);

// Without duplicates; dtypes must not be empty.
std::vector<Case> case_table(Level level, std::span<const flash3_dtype> dtypes);

// Ragged batches: every packing with every kind of lengths, mask, sink and softcap.
std::vector<Case> ragged_case_table(Level level, std::span<const flash3_dtype> dtypes);

// The backward of each case of these tables: all with lse, since a backward needs it; dlse and
// deterministic alternate. Special values only without a mask: what they do to the gradients of
// keys that a row does not see, but that share a tile with ones that it sees, is not specified.
std::vector<Case> backward_case_table(Level level, std::span<const flash3_dtype> dtypes);
// FP8: q, k and v of e4m3 with all kinds of scales and outputs in all that the tables above have,
// and calls that bring 16-bit tensors to FP8 themselves. ragged: of ragged batches alone, or
// without.
std::vector<Case> fp8_case_table(Level level, bool ragged);

// A KV cache: pages of every size, padding, appended keys and rotary embeddings.
std::vector<Case> cache_case_table(Level level, std::span<const flash3_dtype> dtypes);

// Masks as data: every source under every band, shared by sequences and heads or not.
std::vector<Case> mask_case_table(Level level, std::span<const flash3_dtype> dtypes, bool backward);
// Of FP8 tensors, without softcaps: not all backends cap their scores under a mask.
std::vector<Case> fp8_mask_case_table();

// flash3_quantize: every kind of scale, rotated or not, with rotary embeddings, dense and ragged.
std::vector<Case> quantize_case_table(Level level, std::span<const flash3_dtype> dtypes);

std::vector<Case> ragged_backward_case_table(Level level, std::span<const flash3_dtype> dtypes);

// Some of the cases of 16 bits once more, with results in float32.
std::vector<Case> with_unrounded(std::vector<Case> cases);

// Some of the cases once more, with a tensor that a case has no member for and that the backend
// takes, in each of its shapes by turns. Cases of FP8 have none here: those that a backend refuses
// are not in a table.
std::vector<Case> with_added_tensors(std::vector<Case> cases, flash3_backend backend);

// What case_table() has of sinks, softcaps and chunks (options_table.cpp).
std::vector<Case> option_cases(Level level, std::span<const flash3_dtype> dtypes);

// What ragged_case_table() has of tensors without rows and batches without tokens
// (options_table.cpp).
std::vector<Case> empty_cases(std::span<const flash3_dtype> dtypes);

// Pairwise coverage: few rows in which every two levels of every two factors meet at least once.

// sizes[f]: number of levels of factor f. Each row holds one level per factor. Deterministic.
std::vector<std::vector<int>> pairwise(const std::vector<int>& sizes);

// Random problems over everything that the C interface takes: what no table has thought of.

// Problem `index` of the sequence named by seed: always the same, on any machine. Forward calls,
// half as many backward ones, and some of flash3_quantize; of any dtype, head dims, lengths, batch,
// strides, mask and options. Each is a valid call. Most are small, so that the oracle takes
// milliseconds.
Case random_case(uint64_t seed, uint64_t index);

}  // namespace flash3::cases
