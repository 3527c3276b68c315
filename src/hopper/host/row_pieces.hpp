// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace flash3::hopper {

// Whether all rows begin at multiples of 16 bytes and are whole pieces of 16 bytes.
inline bool in_pieces(const TensorView& t, int element_bytes = 2) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
         (t.stride_batch | t.stride_seq | t.stride_head | t.dim) % (16 / element_bytes) == 0;
}

}  // namespace flash3::hopper
