// SPDX-License-Identifier: Apache-2.0
// What becomes of one row of q or k: its rotary position embedding, as flash3_quantize_params
// describes it, and its rotation, x·D·H/√n (core/rotation.hpp).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/convert.hpp"
#include "core/problem.hpp"
#include "core/rotation.hpp"

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

// Every product and every sum is rounded, in an order that other backends keep: first the factors,
// then the sums of neighbours, of neighbours 2 apart, 4 apart and so on.
class Rotation {
 public:
  Rotation(uint64_t seed, int64_t dim) : dim_(static_cast<int>(dim)) {
    for (int i = 0; i < dim_; ++i) {
      const float factor = 1.f / std::sqrt(static_cast<float>(rotation_part(dim_, i).size));
      factor_[i] = rotation_negates(seed, i) ? -factor : factor;
    }
  }
  void apply(float* x) const {
    for (int i = 0; i < dim_; ++i) x[i] *= factor_[i];
    for (int begin = 0; begin < dim_;) {
      const int size = rotation_part(dim_, begin).size;
      for (int step = 1; step < size; step *= 2)
        for (int first = begin; first < begin + size; first += 2 * step)
          for (int i = first; i < first + step; ++i) {
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
          }
      begin += size;
    }
  }

 private:
  int dim_;
  float factor_[kMaxHeadDim];
};

}  // namespace flash3::cpu
