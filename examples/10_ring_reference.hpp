// SPDX-License-Identifier: Apache-2.0
// What 10_ring.cpp is compared with: the whole sequence on the host, and what the CPU makes of it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <flash3/flash3.hpp>
#include <limits>
#include <memory>
#include <vector>

constexpr int64_t kHeads = 8, kKvHeads = 2, kDim = 128;

// bfloat16 is the upper half of a float.
inline uint16_t to_bfloat16(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
}
inline float to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
inline float to_float(float x) { return x; }

// [tokens, heads, kDim] of bfloat16 or float32, as a batch of one.
template <class T>
flash3::Tensor batch_of(T* data, int64_t tokens, int64_t heads) {
  return flash3::tensor(data, sizeof(T) == 4 ? FLASH3_FLOAT32 : FLASH3_BFLOAT16,
                        {1, tokens, heads, kDim});
}

struct Sequence {
  explicit Sequence(int64_t length) : tokens(length) {
    uint64_t random = 1;
    const auto fill = [&](std::vector<uint16_t>& x, int64_t heads, float bound) {
      x.resize(size_t(tokens * heads * kDim));
      for (uint16_t& element : x) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        element = to_bfloat16(bound * (float(random >> 40) * 0x1p-23f - 1));
      }
    };
    fill(q, kHeads, 8), fill(dout, kHeads, 1);  // such q that few keys have most of the weight
    fill(k, kKvHeads, 1), fill(v, kKvHeads, 1);
  }

  void solve() {
    out.resize(q.size()), dq.resize(q.size()), dk.resize(k.size()), dv.resize(k.size());
    lse.resize(size_t(kHeads * tokens));
    const auto of_q = [&](auto& x) { return batch_of(x.data(), tokens, kHeads); };
    const auto of_k = [&](auto& x) { return batch_of(x.data(), tokens, kKvHeads); };
    flash3::Forward forward{.q = of_q(q), .k = of_k(k), .v = of_k(v), .out = of_q(out)};
    flash3::Backward backward{.dout = of_q(dout), .q = of_q(q), .k = of_k(k), .v = of_k(v)};
    backward.out = of_q(out), backward.dq = of_q(dq), backward.dk = of_k(dk);
    backward.dv = of_k(dv);
    forward.lse = backward.lse = flash3::lse_tensor(lse.data(), 1, kHeads, tokens);
    forward.causal = backward.causal = true;
    forward.backend = backward.backend = FLASH3_BACKEND_CPU;

    constexpr size_t kAlign = FLASH3_WORKSPACE_ALIGNMENT;
    const size_t need = std::max(flash3::workspace(forward), flash3::workspace(backward)),
                 bytes = (need / kAlign + 1) * kAlign;
    const std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(kAlign, bytes),
                                                                std::free);
    forward.workspace = backward.workspace = workspace.get();
    forward.workspace_size = backward.workspace_size = bytes;
    flash3::forward(forward);
    flash3::backward(backward);
  }

  int64_t tokens;
  std::vector<uint16_t> q, k, v, dout, out;
  std::vector<float> lse, dq, dk, dv;
};

// As a share of the largest value that is right; a NaN is an infinite error.
template <class T>
float largest_error(const T* got, const T* right, size_t count) {
  float error = 0, largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const float x = to_float(right[i]), difference = std::abs(to_float(got[i]) - x);
    largest = std::max(largest, std::abs(x));
    error = std::max(error,
                     std::isnan(difference) ? std::numeric_limits<float>::infinity() : difference);
  }
  return error / largest;
}
