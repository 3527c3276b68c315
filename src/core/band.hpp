// SPDX-License-Identifier: Apache-2.0
// The one mask: a band of diagonals. Full, causal, sliding window and both together are bands with
// other bounds.
//
//   query i sees key j  ⇔  i + lo ≤ j ≤ i + hi  and  0 ≤ j < seq_k
//
// Bounds come from the user's windows, shifted by seq_k − seq_q so that the band is aligned to the
// bottom right corner (Band::make). Compiled on the host and, through NVRTC too, on the device:
// nothing but integers here, of 64 bits, or in a kernel of 32 (hopper/device/tile_schedule.hpp).
#pragma once

#include "core/host_device.hpp"

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
  using Range = RangeOf<Index>;

  // Outside any tensor (sizes are below 2^31, in 32 bits below 2^30), yet safe to add row numbers
  // to.
  static constexpr Index kUnbounded = Index(1) << (sizeof(Index) == 8 ? 40 : 30);

  Index lo = -kUnbounded;
  Index hi = kUnbounded;

  // window < 0: unbounded on that side.
  FLASH3_HOST_DEVICE static constexpr BandOf make(Index seq_q, Index seq_k, Index window_left,
                                                  Index window_right) {
    const Index shift = seq_k - seq_q;
    BandOf band;
    if (window_left >= 0 && window_left < kUnbounded && shift - window_left > band.lo)
      band.lo = shift - window_left;
    if (window_right >= 0 && window_right < kUnbounded && shift + window_right < band.hi)
      band.hi = shift + window_right;
    return band;
  }

  FLASH3_HOST_DEVICE constexpr bool sees(Index i, Index j) const {
    return i + lo <= j && j <= i + hi;
  }

  // True if no pair of a seq_q × seq_k problem is masked.
  FLASH3_HOST_DEVICE constexpr bool is_full(Index seq_q, Index seq_k) const {
    return seq_q - 1 + lo <= 0 && hi >= seq_k - 1;
  }

  // The keys that at least one query of rows sees (the rows must not be empty).
  FLASH3_HOST_DEVICE constexpr Range keys(Range rows, Index seq_k) const {
    const Index begin = rows.begin + lo, end = rows.end + hi;  // end − 1 + hi is the last key seen
    return {begin > 0 ? begin : 0, end < seq_k ? end : seq_k};
  }

  // The key tiles of width tile_n that hold those keys.
  FLASH3_HOST_DEVICE constexpr Range key_tiles(Range rows, Index seq_k, Index tile_n) const {
    const Range seen = keys(rows, seq_k);
    if (seen.empty()) return {0, 0};
    return {seen.begin / tile_n, (seen.end + tile_n - 1) / tile_n};
  }

  // The key tiles that need no mask: every query of rows sees every key of them. Tiles outside this
  // range need one.
  FLASH3_HOST_DEVICE constexpr Range full_tiles(Range rows, Index seq_k, Index tile_n) const {
    const Index begin = rows.end - 1 + lo, last = rows.begin + hi + 1,
                end = last < seq_k ? last : seq_k;
    return {begin > 0 ? (begin + tile_n - 1) / tile_n : 0, end > 0 ? end / tile_n : 0};
  }

  // True if every query of rows sees every key of [begin, end): such a tile needs no mask.
  FLASH3_HOST_DEVICE constexpr bool covers(Range rows, Range tile) const {
    return rows.end - 1 + lo <= tile.begin && tile.end - 1 <= rows.begin + hi;
  }
};

using Range = RangeOf<Index>;
using Band = BandOf<Index>;

}  // namespace flash3
