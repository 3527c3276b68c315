// SPDX-License-Identifier: Apache-2.0
// The rules of flash3/mask.h: for what a mask is made from, and for the mask that a call is given.
#pragma once

#include "core/mask_problem.hpp"
#include "core/tensor_checks.hpp"

namespace flash3 {

// Checks the params and fills *problem, but for where the mask goes.
Status make_mask_problem(const flash3_mask_params* params, Pointers pointers, MaskProblem* problem);

// Calls visit(name, tensor) for each source that the params have.
template <class Visit>
void visit_sources(const flash3_mask_params& p, const Visit& visit) {
  visit("ranges", p.ranges);
  visit("documents", p.documents);
  visit("dense", p.dense);
  visit("block_counts", p.block_counts);
  visit("block_indices", p.block_indices);
  visit("bits", p.bits);
  visit("bit_blocks", p.bit_blocks);
}

// The tensors with lengths, likewise.
template <class Visit>
void visit_lengths(const flash3_mask_params& p, const Visit& visit) {
  visit("cu_seqlens_q", p.cu_seqlens_q);
  visit("cu_seqlens_k", p.cu_seqlens_k);
  visit("seqused_q", p.seqused_q);
  visit("seqused_k", p.seqused_k);
}

// The same for all rules that mean the same.
MaskRule normalised(MaskRule rule);

// Whether the fields of a mask are any that flash3_mask_make() sets, whatever the call.
Status check_mask_shape(const MaskLists& mask);

// What the fields of a mask say, as a call has it; they have not been checked.
MaskLists mask_lists(const flash3_mask& mask);

// Whether the call may have a mask at all, and, by its fields, this one; then *problem has its
// lists and its band. The problem has everything else already.
Status take_mask(const flash3_forward_params& params, Problem* problem);
Status take_mask(const flash3_backward_params& params, Problem* problem);

}  // namespace flash3
