// SPDX-License-Identifier: Apache-2.0
// What a mask is made from (flash3/mask.h), validated and normalised, and where it goes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/mask_lists.hpp"
#include "core/mask_rule.hpp"
#include "core/seq_info.hpp"
#include "core/status.hpp"
#include "flash3/mask.h"

namespace flash3 {

static_assert(kMaskBlock == FLASH3_MASK_BLOCK && kMostMaskRanges == FLASH3_MASK_MOST_RANGES);
inline constexpr int kAllSeen = FLASH3_MASK_ALL_SEEN;  // in bit_blocks

enum class MaskSource { kBand, kRanges, kDocuments, kDense, kBlocks, kBits, kBitBlocks };

// A source's tensor. Strides count elements and are 0 where a dimension of size 1 stands for all,
// or is not there; the last dimension's is 1.
struct MaskTensor {
  const void* data = nullptr;
  int64_t stride_batch = 0, stride_head = 0;
  int64_t stride_row =
      0;             // from range bound to range bound, query to query, block row to block row
  int64_t size = 0;  // of the last dimension
};

// Bits of blocks of kMaskBlock queries and keys. Strides count bytes.
struct BlockBits {
  const void* data = nullptr;
  int64_t blocks = 0;
  int64_t stride_block = 0, stride_row = 0;
};

// Which lengths a call, or what a mask is made from, has: flash3_mask::lengths.
constexpr int lengths_given(const Sequences& q, const Sequences& k) {
  return (q.packed ? FLASH3_MASK_CU_SEQLENS_Q : 0) | (k.packed ? FLASH3_MASK_CU_SEQLENS_K : 0) |
         (q.has_used ? FLASH3_MASK_SEQUSED_Q : 0) | (k.has_used ? FLASH3_MASK_SEQUSED_K : 0);
}

// Bytes of the memory of a mask with room for where so many documents begin, and where these lie.
inline size_t mask_bytes(const MaskShape& shape, int64_t documents) {
  return static_cast<size_t>(MaskPlaces::of(shape).bytes + MaskStarts::bytes_of(documents));
}
inline MaskStarts mask_starts(const MaskShape& shape, int64_t documents, void* data) {
  return MaskStarts::at(data, MaskPlaces::of(shape).bytes, documents);
}

struct MaskProblem {
  MaskShape shape;
  int64_t documents = 0;  // room for where they begin
  MaskRule rule;
  // Where the sequences lie. Those of a mask without lengths are all shape.seq_q and shape.seq_k
  // long, and the mask may have fewer.
  Sequences sequences_q, sequences_k;
  MaskSource source = MaskSource::kBand;
  MaskTensor tensor;     // ranges, documents, dense, block_indices, bits or bit_blocks
  MaskTensor counts;     // block_counts
  BlockBits block_bits;  // bits, of kBitBlocks
  int64_t block_rows = 0, block_keys = 0;

  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* data = nullptr;  // where the mask goes

  int lengths() const { return lengths_given(sequences_q, sequences_k); }
  MaskStarts starts() const { return mask_starts(shape, documents, data); }
};

// A mask that a call is given; without memory where the call is only a question.
struct MaskLists {
  bool given = false;
  MaskShape shape;
  int64_t documents = 0;  // room for where they begin
  MaskRule rule;          // the band that it was made with
  int lengths = 0;        // which it was made with: lengths_given()
  const void* data = nullptr;
  size_t size = 0;   // of the memory
  uint64_t key = 0;  // what the caller's mask says it is

  MaskMemory memory() const { return MaskMemory::of(shape, const_cast<void*>(data)); }
  MaskStarts starts() const { return mask_starts(shape, documents, const_cast<void*>(data)); }
};

}  // namespace flash3
