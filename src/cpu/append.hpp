// SPDX-License-Identifier: Apache-2.0
// What a call does before its queries look: the new keys and values go into the cache, and q gets
// its rotary embedding and its rotation in the workspace.
#pragma once

#include <cstddef>

#include "core/problem.hpp"

namespace flash3::cpu {

// Bytes of workspace for q with its embedding or rotation; 0 with neither.
size_t transformed_q_bytes(const ForwardProblem& problem);

// Writes the cache. The problem's lengths have been checked.
void run_append(const ForwardProblem& problem);

// Writes q with its embedding and rotation to `memory`, of transformed_q_bytes(); returns its view.
TensorView transform_q(const ForwardProblem& problem, void* memory);

}  // namespace flash3::cpu
