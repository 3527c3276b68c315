// SPDX-License-Identifier: Apache-2.0
// What a call does before its queries look: the new keys and values go into the cache, and q gets
// its rotary embedding and its rotation in the workspace.
#pragma once

#include <cstddef>
#include <vector>

#include "core/problem.hpp"

namespace flash3::cpu {

// Bytes of workspace for q with its embedding or rotation; 0 with neither.
size_t transformed_q_bytes(const ForwardProblem& problem);

// Tokens of one sequence, one thread's work.
struct Tokens {
  Index batch, begin, end;
};

// Made before anything is written, since that can fail: its steps cannot. The problem's lengths
// have been checked, and it outlives this.
class Preparation {
 public:
  explicit Preparation(const ForwardProblem& problem);

  // Writes the cache, if anything is appended.
  void append_keys() const;
  // Writes q with its embedding and rotation to `memory`, of transformed_q_bytes(); returns its
  // view.
  TensorView transform_q(void* memory) const;

 private:
  const ForwardProblem& p_;
  std::vector<Tokens> new_keys_, queries_;
};

}  // namespace flash3::cpu
