// SPDX-License-Identifier: Apache-2.0
// The mask of a tree of drafts, as mask.cuh has that of ranges of keys.
#pragma once

#include "cuda/device/score/key_bits.hpp"
#include "cuda/device/score/mask.cuh"
#include "cuda/device/score/transposed_views.hpp"

namespace flash3::cuda {

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

static_assert(ScoreMask<RangeMask<RowKeys (*)(int)>, KeyBlocks<2, 8>> &&
              ScoreMask<TreeMask<KeyBits (*)(int)>, QueriesByKeys<8>> &&
              ScoreMask<TreeMask<KeyBits (*)(int)>, KeyBlocks<2, 8>>);

}  // namespace flash3::cuda
