// SPDX-License-Identifier: Apache-2.0
// The mask of one sequence: a band of diagonals, cut to chunks. Full, causal, sliding window and
// both together are bands with other bounds:
//
//   query i sees key j  ⇔  i + lo ≤ j ≤ i + hi  and  0 ≤ j < seq_k
//
// Tiles ask for the extremes of their rows' bounds. Those of a band never decrease from row to row,
// in chunks neither, so that a tile's first and last row tell them (MaskOf::firsts); another kind
// of mask finds its own. Compiled on the host and, through NVRTC too, on the device: nothing but
// integers here, of 64 bits, or in a kernel of 32 (cuda/device/types.hpp).
#pragma once

#include "core/arithmetic.hpp"

namespace flash3 {

using Index = long long;

// Half-open range [begin, end); empty if begin ≥ end.
template <class Index>
struct RangeOf {
  Index begin = 0;
  Index end = 0;
  FLASH3_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  FLASH3_HOST_DEVICE constexpr Index size() const { return empty() ? 0 : end - begin; }
};

template <class Index>
struct BandOf {
  // Outside any tensor (sizes are below 2^31, in 32 bits below 2^30), yet safe to add row numbers
  // to.
  static constexpr Index kUnbounded = Index(1) << (sizeof(Index) == 8 ? 40 : 30);

  Index lo = -kUnbounded;
  Index hi = kUnbounded;
};

// What the caller asks for, whatever the lengths of the sequence, as kernels have it
// (MaskRule::narrowed): a band takes an addition for each bound, and the shift no select.
template <class Index>
struct NarrowMaskRuleOf {
  using Band = BandOf<Index>;

  Index window_left = Band::kUnbounded, window_right = Band::kUnbounded;  // 0 to that
  Index chunk = 0;                                                        // 0: none
  Index shift_bits = -1;  // of the shift: all, or none where the diagonal begins at the top left

  FLASH3_HOST_DEVICE constexpr Index shift(Index seq_q, Index seq_k) const {
    return (seq_k - seq_q) & shift_bits;
  }
  // As MaskRule's, but that a window without a bound ends where no key of the sequence lies. To add
  // row numbers to it is as safe: row i's diagonal, i + shift, is as far from 0 as keys or queries.
  FLASH3_HOST_DEVICE constexpr Band band(Index shift) const {
    return {shift - window_left, shift + window_right};
  }
};

struct MaskRule;  // core/mask_rule.hpp

// The least and the most of a bound over some rows.
template <class Index>
struct ExtremesOf {
  Index least, most;
};

// A mask whose rows see one range of keys each: row i sees [first(i), end(i)). firsts(rows) and
// ends(rows) are the extremes of these bounds; rows must not be empty.
template <class Mask, class Index>
concept RowBounds = requires(const Mask& mask, Index i, RangeOf<Index> rows, ExtremesOf<Index> of) {
  i = mask.first(i);
  i = mask.end(i);
  of = mask.firsts(rows);
  of = mask.ends(rows);
};

// What tiles ask such a mask.
template <class Index, RowBounds<Index> Mask>
struct TilesOf {
  using Range = RangeOf<Index>;
  const Mask& mask;

  // No query of rows sees a key outside of this range.
  FLASH3_HOST_DEVICE constexpr Range keys(Range rows, Index seq_k) const {
    const Index begin = mask.firsts(rows).least, last = mask.ends(rows).most;
    return {begin > 0 ? begin : 0, last < seq_k ? last : seq_k};
  }

  // The key tiles of width tile_n that hold those keys.
  FLASH3_HOST_DEVICE constexpr Range key_tiles(Range rows, Index seq_k, Index tile_n) const {
    const Range seen = keys(rows, seq_k);
    if (seen.empty()) return {0, 0};
    return {seen.begin / tile_n, ceil_div(seen.end, tile_n)};
  }

  // The key tiles that need no mask: every query of rows sees every key of them. Tiles outside this
  // range need one.
  FLASH3_HOST_DEVICE constexpr Range full_tiles(Range rows, Index seq_k, Index tile_n) const {
    const Index begin = mask.firsts(rows).most, last = mask.ends(rows).least,
                end = last < seq_k ? last : seq_k;
    return {begin > 0 ? ceil_div(begin, tile_n) : 0, end > 0 ? end / tile_n : 0};
  }

  // True if every query of rows sees every key of [begin, end): such a tile needs no mask.
  FLASH3_HOST_DEVICE constexpr bool covers(Range rows, Range tile) const {
    return mask.firsts(rows).most <= tile.begin && tile.end <= mask.ends(rows).least;
  }
};

template <class Index>
struct MaskOf {
  using Range = RangeOf<Index>;
  using Band = BandOf<Index>;
  using Extremes = ExtremesOf<Index>;

  Band band;
  Index chunk = 0;  // 0: none
  // Row i and column j are in one chunk iff floor((i + row_shift) / chunk) equals
  // floor((j + column_shift) / chunk).
  Index row_shift = 0, column_shift = 0;

  template <class Rule = MaskRule>
  FLASH3_HOST_DEVICE static constexpr MaskOf make(Index seq_q, Index seq_k, const Rule& rule) {
    const Index shift = rule.shift(seq_q, seq_k);
    return {rule.band(shift), rule.chunk, shift, 0};
  }

  // The queries that see a key: rows are keys, columns are queries.
  FLASH3_HOST_DEVICE constexpr MaskOf transposed() const {
    return {{-band.hi, -band.lo}, chunk, column_shift, row_shift};
  }

  // The same, of a mask that has no chunks: then the compiler knows that there are none.
  FLASH3_HOST_DEVICE constexpr MaskOf without_chunks() const { return {band}; }

  // The columns that row i sees, also outside the tensor: [first(i), end(i)).
  FLASH3_HOST_DEVICE constexpr Index first(Index i) const {
    const Index first = i + band.lo;
    if (chunk == 0) return first;
    const Index of_chunk = chunk_of(i) * chunk - column_shift;
    return first > of_chunk ? first : of_chunk;
  }
  FLASH3_HOST_DEVICE constexpr Index end(Index i) const {
    const Index end = i + band.hi + 1;
    if (chunk == 0) return end;
    const Index of_chunk = (chunk_of(i) + 1) * chunk - column_shift;
    return end < of_chunk ? end : of_chunk;
  }

  // Bounds never decrease from row to row.
  FLASH3_HOST_DEVICE constexpr Extremes firsts(Range rows) const {
    return {first(rows.begin), first(rows.end - 1)};
  }
  FLASH3_HOST_DEVICE constexpr Extremes ends(Range rows) const {
    return {end(rows.begin), end(rows.end - 1)};
  }

  FLASH3_HOST_DEVICE constexpr bool sees(Index i, Index j) const {
    return first(i) <= j && j < end(i);
  }
  // True if no pair of a seq_q × seq_k problem is masked.
  FLASH3_HOST_DEVICE constexpr bool is_full(Index seq_q, Index seq_k) const {
    return covers({0, seq_q}, {0, seq_k});
  }

  // As TilesOf says.
  FLASH3_HOST_DEVICE constexpr Range keys(Range rows, Index seq_k) const {
    return TilesOf<Index, MaskOf>{*this}.keys(rows, seq_k);
  }
  FLASH3_HOST_DEVICE constexpr Range key_tiles(Range rows, Index seq_k, Index tile_n) const {
    return TilesOf<Index, MaskOf>{*this}.key_tiles(rows, seq_k, tile_n);
  }
  FLASH3_HOST_DEVICE constexpr Range full_tiles(Range rows, Index seq_k, Index tile_n) const {
    return TilesOf<Index, MaskOf>{*this}.full_tiles(rows, seq_k, tile_n);
  }
  FLASH3_HOST_DEVICE constexpr bool covers(Range rows, Range tile) const {
    return TilesOf<Index, MaskOf>{*this}.covers(rows, tile);
  }

 private:
  FLASH3_HOST_DEVICE constexpr Index chunk_of(Index i) const {
    const Index at = i + row_shift;
    return at >= 0 ? at / chunk : -((chunk - 1 - at) / chunk);
  }
};

using Range = RangeOf<Index>;
using Band = BandOf<Index>;
using Mask = MaskOf<Index>;

}  // namespace flash3
