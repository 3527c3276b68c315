// SPDX-License-Identifier: Apache-2.0
// clang-format off
// Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited.
// What a problem holds of each tensor of flash3_forward_params and flash3_backward_params that calls.py does not place.
#pragma once

#include "core/tensor_view.hpp"

namespace flash3 {

// Of forward and backward calls.
struct AddedViews {
  HeadsView alibi_slopes;
  BiasView bias;
  BiasTableView bias_table;
  StateView dropout_state;
};

// Of forward calls alone.
struct AddedForwardViews {
  LseView max_logits;
};

// Of backward calls alone.
struct AddedBackwardViews {
  BiasView dbias;
  BiasTableView dbias_table;
  HeadsView dalibi_slopes;
};

}  // namespace flash3
