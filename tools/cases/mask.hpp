// SPDX-License-Identifier: Apache-2.0
// The mask of a case: the tensors that it is made from, and what comes of them.
#pragma once

#include <memory>

#include "cases/tensors.hpp"
#include "flash3/mask.h"

namespace flash3::cases {

// What a mask is made from, a function of the case's seed. Long stretches that are seen or hidden
// as a whole lie beside others; bounds of ranges and numbers of blocks are now and then nonsense.
struct MaskSources {
  GuardedTensor ranges, documents, dense, block_counts, block_indices, bits, bit_blocks;

  // Calls visit(name, tensor, field) for each, with the field of the params that it is.
  template <class Visit>
  void visit(const Visit& visit) const {
    visit("ranges", ranges, &flash3_mask_params::ranges);
    visit("documents", documents, &flash3_mask_params::documents);
    visit("dense", dense, &flash3_mask_params::dense);
    visit("block_counts", block_counts, &flash3_mask_params::block_counts);
    visit("block_indices", block_indices, &flash3_mask_params::block_indices);
    visit("bits", bits, &flash3_mask_params::bits);
    visit("bit_blocks", bit_blocks, &flash3_mask_params::bit_blocks);
  }
  // All that the case says, with these tensors.
  flash3_mask_params params(const Case& c) const;
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
