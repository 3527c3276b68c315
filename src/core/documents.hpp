// SPDX-License-Identifier: Apache-2.0
// Documents of a mask as the sequences of a packed batch: the same results, by kernels that need no
// lists.
#pragma once

#include <concepts>
#include <initializer_list>

#include "core/problem.hpp"

namespace flash3 {

// Whether the call can be one of packed documents: its mask says where they begin, and nothing else
// counts queries or keys from the first of the sequence that it is given as. FP8 has scales that
// do.
inline bool may_pack_documents(const Problem& p) {
  const MaskLists& mask = p.mask_lists;
  const bool counts_places = p.bias.given || p.bias_table.given || p.alibi_slopes.given ||
                             p.dropout.given() || p.has_cache();
  return mask.given && mask.documents > 0 && p.batch == 1 && p.seq_q == p.seq_k && !counts_places &&
         !p.has_fp8_keys();
}

// That call. What the mask has no room for is one sequence of queries without keys, and one of keys
// without queries. Where the memory is not there yet neither are the lengths.
template <std::derived_from<Problem> P>
P with_packed_documents(P p) {
  const MaskLists& mask = p.mask_lists;
  const MaskStarts starts = mask.data ? mask.starts() : MaskStarts{};
  p.batch = mask.documents + 1;
  const auto pack = [&](const int* begins, Sequences* sequences) {
    *sequences = {
        .packed = true, .cu = begins, .rows = mask.shape.seq_q, .max_length = mask.shape.seq_q};
  };
  pack(starts.q, &p.sequences_q);
  pack(starts.k, &p.sequences_k);
  const auto pack_tensors = [&](std::initializer_list<TensorView*> views) {
    for (TensorView* view : views) view->batch = p.batch, view->stride_batch = 0;
  };
  pack_tensors({&p.q, &p.k, &p.v, &p.out});
  p.lse.stride_batch = 0;
  if constexpr (requires { p.max_logits; }) p.max_logits.stride_batch = 0;
  if constexpr (requires { p.dout; }) {
    pack_tensors({&p.dout, &p.dq, &p.dk, &p.dv});
    p.dlse.stride_batch = 0;
  }
  p.mask_lists = {};
  return p;
}

}  // namespace flash3
