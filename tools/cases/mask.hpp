// SPDX-License-Identifier: Apache-2.0
// The mask of a case: the tensors that it is made from, and what it becomes.
#pragma once

#include <memory>

#include "cases/tensors.hpp"
#include "flash3/mask.h"

namespace flash3::cases {

// What a mask is made from, a function of the case's seed. Long stretches that are seen or hidden
// as a whole lie beside others; bounds of ranges and numbers of blocks are now and then nonsense.
struct MaskSources {
  GuardedTensor ranges, documents, dense, block_counts, block_indices;

  // All that the case says, with these tensors, which may be elsewhere by now.
  static flash3_mask_params params(const Case& c, const flash3_tensor& ranges,
                                   const flash3_tensor& documents, const flash3_tensor& dense,
                                   const flash3_tensor& block_counts,
                                   const flash3_tensor& block_indices);
  flash3_mask_params params(const Case& c) const {
    return params(c, ranges.view, documents.view, dense.view, block_counts.view,
                  block_indices.view);
  }
};
MaskSources make_mask_sources(const Case& c);

// A mask in host memory, and the pairs that it lets through by the words of mask.h.
struct HostMask {
  MaskSources sources;
  MaskPairs pairs;
  std::shared_ptr<void> memory;
  flash3_mask mask{};
};
// Null where the case has none; throws std::logic_error where the library refuses it.
std::shared_ptr<const HostMask> make_host_mask(const Case& c);

// The mask of a question: without memory and key. It lives as long as the program, one for each
// case; null where the case has none.
const flash3_mask* question_mask(const Case& c);

}  // namespace flash3::cases
