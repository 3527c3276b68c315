// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for the tables of a rotary position embedding.
#pragma once

#include "core/tensor_checks.hpp"

namespace flash3 {

inline Field rotary_field(const char* name, const flash3_tensor& table) {
  return {name, "[positions, rotary_dim / 2]", 2, table};
}

// Two tables, of which one at least is given, against a tensor that gets the embedding. `whose`:
// the tensors that do, in a message.
Status check_rotary_tables(const Field& cos, const Field& sin, const Field& of, const char* whose,
                           Pointers pointers);

RotaryView rotary_view(const flash3_tensor& cos, const flash3_tensor& sin, bool interleaved);

}  // namespace flash3
