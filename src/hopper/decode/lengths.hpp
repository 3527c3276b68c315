// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/seq_info.hpp"
#include "hopper/decode/work.hpp"

namespace flash3::hopper {

// The lengths in 32 bits. plan.cpp has checked that they fit.
inline DecodeLengths decode_lengths(const Sequences& s) {
  return {s.cu, s.used, int(s.rows), int(s.max_length)};
}

}  // namespace flash3::hopper
