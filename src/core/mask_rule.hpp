// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/mask.hpp"

namespace flash3 {

// What the caller asks for, whatever the lengths of the sequence.
struct MaskRule {
  Index window_left = -1, window_right = -1;  // negative: unbounded
  Index chunk = 0;                            // 0: none
  bool top_left = false;                      // the diagonal begins in the first query's first key
  constexpr bool is_none() const { return window_left < 0 && window_right < 0 && chunk == 0; }

  // Row i's diagonal, i', is i plus this.
  FLASH3_HOST_DEVICE constexpr Index shift(Index seq_q, Index seq_k) const {
    return top_left ? 0 : seq_k - seq_q;
  }

  // The windows around the diagonal that is row i, column i + shift.
  FLASH3_HOST_DEVICE constexpr BandOf<Index> band(Index shift) const {
    BandOf<Index> band;
    if (window_left >= 0 && window_left < band.kUnbounded && shift - window_left > band.lo)
      band.lo = shift - window_left;
    if (window_right >= 0 && window_right < band.kUnbounded && shift + window_right < band.hi)
      band.hi = shift + window_right;
    return band;
  }

  // In integers that hold lengths below `longest`, which is at most their kUnbounded: a window or a
  // chunk as wide as that is none.
  template <class Narrow>
  constexpr NarrowMaskRuleOf<Narrow> narrowed(Narrow longest) const {
    const auto window = [=](Index w) {
      return w >= 0 && w < longest ? Narrow(w) : BandOf<Narrow>::kUnbounded;
    };
    return {window(window_left), window(window_right), chunk < longest ? Narrow(chunk) : longest,
            Narrow(top_left ? 0 : -1)};
  }

  // Calls visit(…) with all that a rule is made of.
  template <class Visit>
  constexpr void visit(const Visit& visit) const {
    visit(window_left, window_right, chunk, top_left);
  }
};

}  // namespace flash3
