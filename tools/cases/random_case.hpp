// SPDX-License-Identifier: Apache-2.0
// Random problems over everything that the C interface takes: what no table has thought of.
#pragma once

#include <cstdint>

#include "cases/case.hpp"

namespace flash3::cases {

// Problem `index` of the sequence named by seed: always the same, on any machine. Forward calls,
// half as many backward ones, and some of flash3_quantize; of any dtype, head dims, lengths, batch,
// strides, mask and options. Each is a valid call. Most are small, so that the oracle takes
// milliseconds.
Case random_case(uint64_t seed, uint64_t index);

}  // namespace flash3::cases
