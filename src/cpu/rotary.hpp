// SPDX-License-Identifier: Apache-2.0
// The rotary position embedding of one row, as flash3_quantize_params describes it.
#pragma once

#include "core/convert.hpp"
#include "core/problem.hpp"

namespace flash3::cpu {

inline void apply_rope(const RotaryView& rotary, int64_t position, float* x) {
  const int pairs = rotary.dim / 2;
  const int step = rotary.interleaved ? 2 : 1, other = rotary.interleaved ? 1 : pairs;
  for (int i = 0; i < pairs; ++i) {
    const float cos = load_float(rotary.cos, rotary.dtype, position * rotary.stride_cos + i);
    const float sin = load_float(rotary.sin, rotary.dtype, position * rotary.stride_sin + i);
    float &a = x[i * step], &b = x[i * step + other];
    const float rotated = a * cos - b * sin;
    b = a * sin + b * cos;
    a = rotated;
  }
}

}  // namespace flash3::cpu
