// SPDX-License-Identifier: Apache-2.0
// Masks a tile of scores that the mask's edge, or the end of the keys, runs through. Which tiles
// are skipped and which need no mask, a kernel has asked before (core/mask.hpp: TilesOf).
//
// Nothing here takes rows to be in any order: a row says itself what it sees.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/score/view.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda {

// Sets the scores of hidden keys to −∞.
template <class Mask, class View>
concept ScoreMask =
    ScoreView<View> && requires(const Mask& mask, const View& view, typename View::Scores& r_s) {
      mask.apply(view, r_s);
    };

// A thread has few keys of each of its rows: what depends on keys alone is kept for all rows.
// Otherwise what rows see is brought to the view's keys, whose offsets are constants.
template <ScoreView View>
inline constexpr bool kHasFewKeys = View::kKeys <= 4;

// Rows that see a range of keys each, as under a band: rows(r) is what the view's row r sees.
// kFirst: whether there may be keys before it.
template <class Rows, bool kFirst = true>
struct RangeMask {
  const Rows& rows;

  template <ScoreView View>
  __device__ __forceinline__ void apply(const View& view, typename View::Scores& r_s) const {
#pragma unroll
    for (int r = 0; r < View::kRows; ++r) {
      // First and last visible key of the row, and keys, from `origin`.
      const RowKeys keys = rows(r);
      const int origin = kHasFewKeys<View> ? 0 : view.key(0);
      const int first = keys.first - origin, last = keys.end - 1 - origin;
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        const int key = kHasFewKeys<View> ? view.key(k) : View::key_offset(k);
        const bool visible = (!kFirst || key >= first) && key <= last;
        if (!visible) View::at(r_s, r, k) = -kInfinity;
      }
    }
  }
};

// A bit for each key before `end` that a thread has of a row: key k is bit k, of QueriesByKeys.
template <int kKeys>
__device__ __forceinline__ uint32_t keys_before(int end) {
  const int inside = min(max(end, 0), 4 * kKeys);
  return (1u << (inside / 8 * 2 + min(inside % 8, 2))) - 1;
}

static_assert(ScoreMask<RangeMask<RowKeys (*)(int)>, QueriesByKeys<8>>);

}  // namespace flash3::cuda
