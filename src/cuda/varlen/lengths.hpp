// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/seq_info.hpp"
#include "cuda/varlen/lengths.h"

namespace flash3::cuda {

// The lengths in 32 bits; whoever plans a kernel has checked that they fit.
inline SequenceLengths lengths_of(const Sequences& s) {
  return {s.cu, s.used, int(s.rows), int(s.max_length)};
}

}  // namespace flash3::cuda
