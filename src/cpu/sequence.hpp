// SPDX-License-Identifier: Apache-2.0
// The sequences of a batch, ragged or not, as the CPU sees them: their lengths are read when the
// call runs.
#pragma once

#include "core/problem.hpp"

namespace flash3::cpu {

// A sequence with its own lengths, and the mask that these make.
struct Sequence {
  Index batch = 0;
  RowRange q, k;
  Mask mask;
  const uint64_t* tree = nullptr;  // a word for each query, or none

  // The keys from this one on are for the words to show.
  Index first_draft() const { return k.length - q.length; }
  bool hides(Index query, Index key) const {
    return tree && key >= first_draft() && (tree[query] >> (key - first_draft()) & 1) == 0;
  }
};

inline Sequence sequence_of(const Problem& p, Index batch) {
  const SeqInfo lengths = p.sequence(batch);
  return {batch, lengths.q, lengths.k, p.mask(lengths), p.tree.of(batch, lengths.q)};
}

// Where row `seq` of a sequence's tensor begins; rows: its q or k.
inline Index row_offset(const TensorView& t, Index batch, const RowRange& rows, Index seq,
                        Index head) {
  return batch * t.stride_batch + (rows.first + seq) * t.stride_seq + head * t.stride_head;
}
inline Index row_offset(const LseView& t, const Sequence& s, Index query, Index head) {
  return s.batch * t.stride_batch + head * t.stride_head + s.q.first + query;
}

// Where key j of a sequence begins in k or v, which may be a cache.
inline Index key_offset(const Problem& p, const TensorView& t, const Sequence& s, Index j,
                        Index head) {
  const CacheRow at = cache_row(p.cache, s.batch, s.k.first + j);
  return at.element * t.stride_batch + at.row * t.stride_seq + head * t.stride_head;
}

// What a packed row of a KV head with a group of query heads is (attention.hpp).
struct PackedRow {
  Index query, head;  // of all query heads
};
inline PackedRow packed_row(Index group, Index kv_head, Index r) {
  return {r / group, kv_head * group + r % group};
}

// Queries of the whole batch, as far as can be told without reading the lengths.
inline Index most_queries(const Problem& p) {
  return p.sequences_q.packed ? p.sequences_q.rows : p.batch * p.seq_q;
}
inline Index most_keys(const Problem& p) {
  return p.sequences_k.packed ? p.sequences_k.rows : p.batch * p.seq_k;
}

}  // namespace flash3::cpu
