// SPDX-License-Identifier: Apache-2.0
// A block of queries as a thread block sees it: which range of keys each query can see.
#pragma once

#include "cuda/mask/kept_blocks.cuh"
#include "cuda/mask/key_bits.hpp"
#include "cuda/mask/mask_params.h"

namespace flash3::cuda {

inline constexpr int kMostInt = 0x7FFFFFFF;

// Of a sequence and a head, of those that the mask has.
struct QueryBlock {
  int batch, head, block;
  long long first;  // query
  int rows;         // queries that there are; none after the sequence's end
  int q_first, q_length, k_first, k_length;  // of the sequence (core/seq_info.hpp)

  __device__ __forceinline__ QueryBlock(const MaskParams& p, long long list) {
    const MaskShape& shape = p.memory.shape;
    const long long pair = list / shape.q_blocks();
    block = int(list - pair * shape.q_blocks());
    batch = int(pair / shape.heads), head = int(pair % shape.heads);
    first = (long long)block * kMaskBlock;
    const SeqInfo sequence = seq_info(p.q, p.k, batch);
    q_first = int(sequence.q.first), q_length = int(sequence.q.length);
    k_first = int(sequence.k.first), k_length = int(sequence.k.length);
    rows = int(max(0ll, min((long long)kMaskBlock, q_length - first)));
  }
};

// What is seen of a block of keys, as a warp finds it.
struct Seen {
  int quarters = 0;  // none: nothing
  MaskKind kind = kMaskFull;
  int range = 0;
};

// Those of a block all of whose keys all queries see.
__device__ __forceinline__ int quarters_with_rows(const QueryBlock& of) {
  return of.rows > kMaskQuarter ? kAllQuarters : quarters_of_rows(0);
}

// What the queries of a block can see, in shared memory.
template <int kMostRanges>
struct RowRanges {
  MaskRange rows[kMostRanges][kMaskBlock];
  int begin[kMostRanges], end[kMostRanges];  // of all rows; begin ≥ end: no row sees any key
  int last_begin[kMostRanges], first_end[kMostRanges];  // each row sees the keys between them
  int count;

  // Keys [begin, end), so that all that is seen lies among them.
  __device__ __forceinline__ MaskRange keys() const {
    MaskRange all{kMostInt, 0};
    for (int r = 0; r < count; ++r) all = {min(all.begin, begin[r]), max(all.end, end[r])};
    return all;
  }
  __device__ __forceinline__ bool reaches(int r, int first_key) const {
    return end[r] > first_key && begin[r] - first_key < kMaskBlock;
  }
  __device__ __forceinline__ bool covers(int r, int first_key) const {
    return last_begin[r] <= first_key && first_end[r] - first_key >= kMaskBlock;
  }
  __device__ __forceinline__ KeyBits bits(int r, int row, int first_key) const {
    const MaskRange seen = rows[r][row];
    return KeyBits::of(seen.begin - first_key, seen.end - first_key);
  }
};

// Fills them, here and in the mask: what both the band and source_range(range, row) let a query
// see. All threads call it; a barrier comes after it.
template <int kThreads, int kMostRanges, class SourceRange>
__device__ __forceinline__ void find_ranges(const MaskParams& p, const QueryBlock& of,
                                            RowRanges<kMostRanges>& found,
                                            const SourceRange& source_range) {
  const MaskShape& shape = p.memory.shape;
  const int count = int(shape.ranges);
  if (threadIdx.x < kMostRanges) {
    found.begin[threadIdx.x] = found.first_end[threadIdx.x] = kMostInt;
    found.end[threadIdx.x] = found.last_begin[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) found.count = count;
  __syncthreads();
  const long long seq_k = of.k_length;
  const Mask band = Mask::make(of.q_length, seq_k, p.rule);
  for (int i = threadIdx.x; i < count * kMaskBlock; i += kThreads) {  // all lanes of a warp or none
    const int r = i / kMaskBlock, row = i % kMaskBlock;
    const long long query = of.first + row;
    MaskRange seen{0, 0};
    if (row < of.rows) {
      const MaskRange own = source_range(r, row);
      const long long begin = max(max(0ll, (long long)own.begin), band.first(query)),
                      end = min(min(seq_k, (long long)own.end), band.end(query));
      if (begin < end) seen = {int(begin), int(end)};
    }
    found.rows[r][row] = seen;
    *p.memory.range(r, of.batch, of.head, query) = seen;
    const bool sees = seen.begin < seen.end, is_row = row < of.rows;
    const int first = sees ? seen.begin : kMostInt;
    const int begin = __reduce_min_sync(~0u, first), end = __reduce_max_sync(~0u, seen.end),
              last_begin = __reduce_max_sync(~0u, is_row ? first : 0),
              first_end = __reduce_min_sync(~0u, is_row ? seen.end : kMostInt);
    if (threadIdx.x % 32 != 0) continue;
    atomicMin(&found.begin[r], begin), atomicMax(&found.end[r], end);
    atomicMax(&found.last_begin[r], last_begin), atomicMin(&found.first_end[r], first_end);
  }
  __syncthreads();
}

// What a warp knows of a block of keys, row by row: seen(i) are the keys that the lane's row i
// sees. In `reached` is a bit for each range that reaches into the block.
template <int kMostRanges>
__device__ __forceinline__ Seen kind_of(const RowRanges<kMostRanges>& ranges, const QueryBlock& of,
                                        int first_key, unsigned reached, const KeyBits (&seen)[4]) {
  unsigned some = 0, hidden = 0;  // quarters that have a pair that is seen, and one that is not
  unsigned same = reached;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = row_of_lane(threadIdx.x % 32, i);
    if (row >= of.rows) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned quarter = quarter_bit(i / 2, half);
      some |= seen[i].any(half) ? quarter : 0;
      hidden |= seen[i].all(half) ? 0 : quarter;
    }
    for (unsigned left = same; left != 0; left &= left - 1) {
      const int r = __ffs(left) - 1;
      if (!(ranges.bits(r, row, first_key) == seen[i])) same &= ~(1u << r);
    }
  }
  const unsigned quarters = __reduce_or_sync(~0u, some | hidden << 8);
  some = quarters & kAllQuarters, hidden = quarters >> 8;
  if (some == 0) return {};
  if (hidden == 0) return {int(some), kMaskFull};
  if ((some & hidden) == 0) return {int(some), kMaskQuarters};
  same = __reduce_and_sync(~0u, same);
  if (same != 0) return {int(some), kMaskRange, __ffs(int(same)) - 1};
  return {int(some), kMaskBits};
}

}  // namespace flash3::cuda
