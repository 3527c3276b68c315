// SPDX-License-Identifier: Apache-2.0
// The mask of a case: the tensors that it is made from, and what it becomes.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "cases/tensors.hpp"
#include "flash3/mask.h"

namespace flash3::cases {

// What a mask is made from, a function of the case's seed. Long stretches that are seen or hidden
// as a whole lie beside others; bounds of ranges and numbers of blocks are now and then nonsense.
struct MaskSources {
  GuardedTensor ranges, documents, dense, block_counts, block_indices, bits, bit_blocks;
  GuardedTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;

  // Calls visit(name, tensor, field) for each, with the field of the params that it is.
  template <class Visit>
  void visit(const Visit& visit) const {
    visit_all(*this, visit);
  }
  template <class Visit>
  void visit(const Visit& visit) {
    visit_all(*this, visit);
  }
  // All that the case says, with these tensors.
  flash3_mask_params params(const Case& c) const;

 private:
  template <class Sources, class Visit>
  static void visit_all(Sources& s, const Visit& visit) {
    using P = flash3_mask_params;
    visit("ranges", s.ranges, &P::ranges);
    visit("documents", s.documents, &P::documents);
    visit("dense", s.dense, &P::dense);
    visit("block_counts", s.block_counts, &P::block_counts);
    visit("block_indices", s.block_indices, &P::block_indices);
    visit("bits", s.bits, &P::bits);
    visit("bit_blocks", s.bit_blocks, &P::bit_blocks);
    visit("cu_seqlens_q of the mask", s.cu_seqlens_q, &P::cu_seqlens_q);
    visit("cu_seqlens_k of the mask", s.cu_seqlens_k, &P::cu_seqlens_k);
    visit("seqused_q of the mask", s.seqused_q, &P::seqused_q);
    visit("seqused_k of the mask", s.seqused_k, &P::seqused_k);
  }
};
MaskSources make_mask_sources(const Case& c);

// All that the case says, with tensors that have no memory: for questions.
flash3_mask_params mask_params_without_memory(const Case& c);
// Why the library makes no such mask; "": it does, or the case has none.
std::string mask_objection(const Case& c);

// A mask in host memory.
struct HostMask {
  MaskSources sources;
  flash3_mask_params params{};  // that it was made with
  std::shared_ptr<void> memory;
  flash3_mask mask{};

  // Those that it lets through by the words of mask.h; found when they are first asked for.
  const MaskPairs& pairs() const;

 private:
  mutable std::once_flag found_;
  mutable MaskPairs pairs_;
};
// Null where the case has none; throws std::logic_error where the library refuses it.
std::shared_ptr<const HostMask> make_host_mask(const Case& c);

// The mask of a question: without memory and key. It lives as long as the program, one for each
// case; null where the case has none.
const flash3_mask* question_mask(const Case& c);

// What a mask holds: blocks, by how their pairs are told, and the blocks that there could be, of
// the lists that it has; and the pairs of all sequences and query heads.
struct MaskFacts {
  int64_t full = 0, quarters = 0, ranges = 0, bits = 0, all_blocks = 0;
  double pairs = 0;
};
// It lives as long as the program; null where the case has no mask.
const MaskFacts* mask_facts(const Case& c);

// visible_pairs() and flops(), of a mask those that it lets through: pairs of a head, the mean.
double seen_pairs(const Case& c);
double seen_flops(const Case& c);
// Of all pairs; 0 where there are none.
double seen_share(const Case& c);

}  // namespace flash3::cases
