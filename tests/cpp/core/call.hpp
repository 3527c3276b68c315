// SPDX-License-Identifier: Apache-2.0
// A small valid forward call on host memory that a test can then bend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flash3/flash3.hpp"

namespace flash3::test {

struct Sizes {
  int64_t batch = 2, seq_q = 3, seq_k = 5, heads_q = 4, heads_k = 2, head_dim = 8, head_dim_v = 16;
};

// Owns the memory of a float32 call.
class Call {
 public:
  explicit Call(const Sizes& s = {}, bool with_lse = true)
      : q_(fill(s.batch * s.seq_q * s.heads_q * s.head_dim)),
        k_(fill(s.batch * s.seq_k * s.heads_k * s.head_dim)),
        v_(fill(s.batch * s.seq_k * s.heads_k * s.head_dim_v)),
        out(static_cast<size_t>(s.batch * s.seq_q * s.heads_q * s.head_dim_v), kUntouched),
        lse(static_cast<size_t>(s.batch * s.heads_q * s.seq_q), kUntouched) {
    args.q = tensor(q_.data(), FLASH3_FLOAT32, {s.batch, s.seq_q, s.heads_q, s.head_dim});
    args.k = tensor(k_.data(), FLASH3_FLOAT32, {s.batch, s.seq_k, s.heads_k, s.head_dim});
    args.v = tensor(v_.data(), FLASH3_FLOAT32, {s.batch, s.seq_k, s.heads_k, s.head_dim_v});
    args.out = tensor(out.data(), FLASH3_FLOAT32, {s.batch, s.seq_q, s.heads_q, s.head_dim_v});
    if (with_lse) args.lse = lse_tensor(lse.data(), s.batch, s.heads_q, s.seq_q);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  flash3_forward_params params() const { return args.params(); }

  static constexpr float kUntouched = -12345.f;

 private:
  // Values that differ from each other and stay small.
  std::vector<float> fill(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) {
      state_ = state_ * 1664525u + 1013904223u;
      x = static_cast<float>(state_ >> 8) / (1 << 23) - 1.f;
    }
    return values;
  }

  uint32_t state_ = 1;
  std::vector<float> q_, k_, v_;

 public:
  std::vector<float> out, lse;
  Forward args;
};

}  // namespace flash3::test
