// SPDX-License-Identifier: Apache-2.0
// The tree_mask of a case: every sequence's drafts are a tree, but now and then a query sees any
// drafts or none, and bits after the last draft are anything.
#pragma once

#include "cases/tensors.hpp"

namespace flash3::cases {

// Without data: [batch, seq_q], or [total_q].
flash3_tensor tree_mask_view(const Case& c, const CaseSequences& sequences);

// A function of the case's seed.
GuardedTensor make_tree_mask(const Case& c, const CaseSequences& sequences);

}  // namespace flash3::cases
