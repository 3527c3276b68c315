// SPDX-License-Identifier: Apache-2.0
// What a call with k_new does before its queries look: the new keys and values go into the cache,
// and q gets its rotary embedding in the workspace.
#pragma once

#include <cstddef>

#include "core/problem.hpp"

namespace flash3::cpu {

// Bytes of workspace for q with its embedding; 0 without one.
size_t rotated_q_bytes(const ForwardProblem& problem);

// Writes the cache. The problem's lengths have been checked.
void run_append(const ForwardProblem& problem);

// Writes q with its embedding to `memory`, of rotated_q_bytes(); returns its view.
TensorView rotate_q(const ForwardProblem& problem, void* memory);

}  // namespace flash3::cpu
