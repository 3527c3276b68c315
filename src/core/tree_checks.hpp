// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for tree_mask, and the field of the problem that it becomes.
#pragma once

#include "core/tensor_checks.hpp"

namespace flash3 {

Status check_tree(const flash3_forward_params& params, const Field& q, Pointers pointers);

TreeMask tree_mask(const flash3_forward_params& params);

}  // namespace flash3
