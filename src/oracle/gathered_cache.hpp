// SPDX-License-Identifier: Apache-2.0
// A call on a KV cache as one without: keys and values gathered from the cache and from what is
// appended, and q with its rotary embedding and rotation. For the oracles, which then know nothing
// of caches; tests/cpp/cpu/definition_test.cpp holds it against the definition. Host memory.
#pragma once

#include <cstddef>
#include <vector>

#include "core/problem.hpp"

namespace flash3 {

class GatheredCache {
 public:
  explicit GatheredCache(const ForwardProblem& problem);
  GatheredCache(const GatheredCache&) = delete;
  GatheredCache& operator=(const GatheredCache&) = delete;

  // [batch, the most keys, heads_k, dim] with a length for each sequence; of a call without a
  // cache, which may rotate q, the keys that it has.
  const ForwardProblem& problem() const { return made_; }

 private:
  void gather_keys(const ForwardProblem& problem);
  void transform_q(const ForwardProblem& problem);

  ForwardProblem made_;
  std::vector<std::byte> q_, k_, v_;
  std::vector<float> k_scales_, v_scales_;
  std::vector<int> lengths_;
};

// Writes what the call appends into the problem's k and v, as flash3_forward does first.
void append_ref(const ForwardProblem& problem);

}  // namespace flash3
