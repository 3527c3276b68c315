// SPDX-License-Identifier: Apache-2.0
// Masks that ranges of keys tell: the band alone, the caller's ranges, documents.
#pragma once

#include "cuda/mask/query_block.cuh"

namespace flash3::cuda {

// The union of ranges. Where there is one, no block needs bits.
template <int kMost>
struct OfRanges {
  static constexpr int kMostRanges = kMost, kThreads = 256, kMostBlocks = 2048;
  static constexpr bool kNeedsBits = kMost > 1;
  using Ranges = RowRanges<kMost>;

  __device__ __forceinline__ static Seen look(const Ranges& ranges, const QueryBlock& of,
                                              int first_key, KeyBits (&seen)[4]) {
    for (int r = 0; r < ranges.count; ++r)
      if (ranges.covers(r, first_key)) return {quarters_with_rows(of), kMaskFull};
    if constexpr (kMost == 1) {
      return look_at_one(ranges, of, first_key);
    } else {
      unsigned reached = 0;
      for (int r = 0; r < ranges.count; ++r) reached |= unsigned(ranges.reaches(r, first_key)) << r;
      if (reached == 0) return {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        seen[i] = {};
        for (unsigned left = reached; left != 0; left &= left - 1)
          seen[i].add(ranges.bits(__ffs(left) - 1, row_of_lane(threadIdx.x % 32, i), first_key));
      }
      return kind_of(ranges, of, first_key, reached, seen);
    }
  }

 private:
  __device__ __forceinline__ static Seen look_at_one(const Ranges& ranges, const QueryBlock& of,
                                                     int first_key) {
    unsigned quarters = 0;  // that have a pair that is seen, and from bit 8 on one that is not
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = first_key + half * kMaskQuarter;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = threadIdx.x % 32 + 32 * i;
        if (row >= of.rows) continue;
        const MaskRange own = ranges.rows[0][row];  // [0, 0) where none is seen
        const int begin = own.begin - first, end = own.end - first;
        if (end > 0 && begin < kMaskQuarter && begin < end) quarters |= quarter_bit(i / 2, half);
        if (begin > 0 || end < kMaskQuarter) quarters |= quarter_bit(i / 2, half) << 8;
      }
    }
    quarters = __reduce_or_sync(~0u, quarters);
    const int some = int(quarters & kAllQuarters);
    const unsigned hidden = quarters >> 8;
    if (some == 0) return {};
    return {some, hidden == 0 ? kMaskFull : (some & hidden) == 0 ? kMaskQuarters : kMaskRange};
  }
};

// Sources are made by all threads of a block for a block of queries, after a barrier.
struct ByBand : OfRanges<1> {
  struct Shared {};
  __device__ __forceinline__ ByBand(const MaskParams&, const QueryBlock&, Shared&) {}
  __device__ __forceinline__ MaskRange range(int, int) const { return {0, kMostInt}; }
  __device__ __forceinline__ int most_blocks() const { return kMostBlocks; }
  __device__ __forceinline__ void prepare(int, int) const {}
  __device__ __forceinline__ Seen operator()(const Ranges& ranges, const QueryBlock& of, int block,
                                             KeyBits (&seen)[4]) const {
    return look(ranges, of, block * kMaskBlock, seen);
  }
};

template <int kMost>
struct ByRanges : OfRanges<kMost> {
  using typename OfRanges<kMost>::Ranges;
  struct Shared {};
  const MaskParams& p;
  const QueryBlock& of;

  __device__ __forceinline__ ByRanges(const MaskParams& params, const QueryBlock& block, Shared&)
      : p(params), of(block) {}
  __device__ __forceinline__ MaskRange range(int r, int row) const {
    const auto bound = [&](int which) {
      return __ldg(p.source.row<int>(of.batch, of.head, which) + of.q_first + of.first + row);
    };
    return {bound(2 * r), bound(2 * r + 1)};
  }
  __device__ __forceinline__ int most_blocks() const { return this->kMostBlocks; }
  __device__ __forceinline__ void prepare(int, int) const {}
  __device__ __forceinline__ Seen operator()(const Ranges& ranges, const QueryBlock& rows,
                                             int block, KeyBits (&seen)[4]) const {
    return this->look(ranges, rows, block * kMaskBlock, seen);
  }
};

}  // namespace flash3::cuda
