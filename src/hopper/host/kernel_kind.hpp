// SPDX-License-Identifier: Apache-2.0
// Which kind of kernel a call needs: by its mask and by its scores. One place for forward and
// backward.
#pragma once

#include <algorithm>

#include "core/message.hpp"
#include "core/problem.hpp"
#include "hopper/device/score_kind.hpp"
#include "hopper/device/softcap.hpp"

namespace flash3::hopper {

// Whether the mask may hide a key that exists. The lengths of a ragged batch are not known.
inline bool may_hide(const Problem& p) {
  const MaskRule& rule = p.mask_rule;
  return p.is_ragged() ? rule.window_left >= 0 || rule.window_right >= 0 || rule.chunk > 0
                       : !p.mask().is_full(p.seq_q, p.seq_k);
}

// Whether there may be keys that no query of their sequence sees, in front of the first query's
// window or chunk.
inline bool may_hide_keys(const Problem& p) {
  const Index longest = std::max(p.seq_q, p.seq_k);
  const MaskRule& rule = p.mask_rule;
  return (rule.window_left >= 0 && rule.window_left < longest - 1) ||
         (rule.chunk > 0 && rule.chunk < longest);
}

inline ScoreKind score_kind(const Problem& p) {
  return p.softcap > 0.f ? ScoreKind::kSoftcap : ScoreKind::kPlain;
}

// Softcaps have band kernels alone: a band may hide nothing.
inline bool needs_band(const Problem& p) {
  return score_kind(p) == ScoreKind::kSoftcap || may_hide(p);
}

inline Status check_softcap(const Problem& p) {
  const auto within = [](double x) { return x >= kSmallestSoftcap && x <= kLargestSoftcap; };
  if (p.softcap > 0.f && !(within(p.softcap) && within(double{p.softmax_scale} / p.softcap)))
    return unsupported(message("softcap = ", p.softcap, " with softmax_scale = ", p.softmax_scale,
                               " but the hopper backend takes softcap and softmax_scale / softcap "
                               "from ",
                               kSmallestSoftcap, " to ", kLargestSoftcap));
  return {};
}

}  // namespace flash3::hopper
