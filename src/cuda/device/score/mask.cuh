// SPDX-License-Identifier: Apache-2.0
// Masks a tile of scores that the mask's edge, or the end of the keys, runs through. Which tiles
// are skipped and which need no mask, a kernel has asked before (core/mask.hpp: TilesOf).
//
// Nothing here takes rows to be in any order: a row says itself what it sees.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/score/row_keys.hpp"
#include "cuda/device/score/view.hpp"

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

// The same by bits: one instruction makes seven predicates of them, where two comparisons a score
// take longer. Measured in the backward, which uses it.
template <class Rows>
struct RangeMaskByBits {
  const Rows& rows;

  template <int N>
  __device__ __forceinline__ void apply(const QueriesByKeys<N>& view, float (&r_s)[N]) const {
    using View = QueriesByKeys<N>;
    constexpr int kSlices = (N + 61) / 62, kSlice = View::kKeys / kSlices;  // 31 bits at most
    static_assert(kSlice * kSlices == View::kKeys && kSlice % 2 == 0);
#pragma unroll
    for (int r = 0; r < View::kRows; ++r) {
      const RowKeys& seen = rows(r);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int first = view.key(slice * kSlice);
        const uint32_t visible =
            keys_before<kSlice>(seen.end - first) & ~keys_before<kSlice>(seen.first - first);
#pragma unroll
        for (int i = 0; i < kSlice; ++i) {
          float& x = View::at(r_s, r, slice * kSlice + i);
          x = visible & 1u << i ? x : -kInfinity;
        }
      }
    }
  }
};

// Rows that see all keys before `end`, but of those from first_bit on only the ones that their
// words show: a tree of drafts. words(r) is that of the view's row r.
template <class Words>
struct TreeMask {
  const Words& words;
  int first_bit, end;

  template <ScoreView View>
  __device__ __forceinline__ void apply(const View& view, typename View::Scores& r_s) const {
    if constexpr (kHasFewKeys<View>)
      shift_keys(view, r_s);
    else
      shift_words(view, r_s);
  }

 private:
  template <class View>
  __device__ __forceinline__ void shift_words(const View& view, typename View::Scores& r_s) const {
    static_assert(View::key_offset(View::kKeys - 1) < 64);
    const int last = end - 1 - view.key(0);
#pragma unroll
    for (int r = 0; r < View::kRows; ++r) {
      const uint64_t hidden = hidden_from(words(r), first_bit, view.key(0));
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        const int key = View::key_offset(k);
        const bool hides = (key > last) | ((hidden >> key & 1) != 0);
        if (hides) View::at(r_s, r, k) = -kInfinity;
      }
    }
  }
  template <class View>
  __device__ __forceinline__ void shift_keys(const View& view, typename View::Scores& r_s) const {
    KeyBits bits[View::kKeys];
    bool exists[View::kKeys];
#pragma unroll
    for (int k = 0; k < View::kKeys; ++k) {
      bits[k] = bits_of_key(view.key(k), first_bit);
      exists[k] = view.key(k) < end;
    }
#pragma unroll
    for (int r = 0; r < View::kRows; ++r) {
      const KeyBits shown = words(r);
      const unsigned hidden_low = ~shown.low, hidden_high = ~shown.high;
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        const unsigned hidden = (bits[k].low & hidden_low) | (bits[k].high & hidden_high);
        if (!exists[k] || hidden != 0) View::at(r_s, r, k) = -kInfinity;
      }
    }
  }
};

// Rows that see the keys whose bits are set, of which a word has 16 of each row: those of its
// second row come after those of the first.
struct BitMask {
  const uint32_t (&words)[2];

  template <int N>
  __device__ __forceinline__ void apply(const QueriesByKeys<N>&, float (&r_s)[N]) const {
    using View = QueriesByKeys<N>;
    static_assert(View::kKeys <= 32);
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        float& x = View::at(r_s, r, k);
        x = words[k / 16] & 1u << (16 * r + k % 16) ? x : -kInfinity;
      }
  }
};

static_assert(ScoreMask<RangeMask<RowKeys (*)(int)>, QueriesByKeys<8>> &&
              ScoreMask<RangeMask<RowKeys (*)(int)>, KeyBlocks<2, 8>> &&
              ScoreMask<RangeMaskByBits<RowKeys (*)(int)>, QueriesByKeys<8>> &&
              ScoreMask<BitMask, QueriesByKeys<8>> &&
              ScoreMask<TreeMask<KeyBits (*)(int)>, QueriesByKeys<8>> &&
              ScoreMask<TreeMask<KeyBits (*)(int)>, KeyBlocks<2, 8>>);

}  // namespace flash3::cuda
