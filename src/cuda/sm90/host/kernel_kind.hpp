// SPDX-License-Identifier: Apache-2.0
// Which kind of kernel a call needs, by its mask, its scores and its rows, and what kernels are
// called. One place for forward and backward.
#pragma once

#include <algorithm>
#include <string>

#include "core/message.hpp"
#include "core/problem.hpp"
#include "cuda/device/score/softcap.hpp"
#include "cuda/device/types.hpp"
#include "cuda/host/element_type.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {

// Whether the mask may hide a key that exists. The lengths of a ragged batch are not known.
inline bool may_hide(const Problem& p) {
  return p.is_ragged() ? !p.mask_rule.is_none() : !p.mask().is_full(p.seq_q, p.seq_k);
}

// Whether there may be keys that no query of their sequence sees, in front of the first query's
// window or chunk.
inline bool may_hide_keys(const Problem& p) {
  const Index longest = std::max(p.seq_q, p.seq_k);
  const MaskRule& rule = p.mask_rule;
  return (rule.window_left >= 0 && rule.window_left < longest - 1) ||
         (rule.chunk > 0 && rule.chunk < longest);
}

constexpr TileMaskRule tile_mask_rule(const MaskRule& rule) { return rule.narrowed(kMaxLength); }

inline ScoreKind score_kind(const Problem& p) {
  return p.softcap > 0.f ? ScoreKind::kSoftcap : ScoreKind::kPlain;
}

// Softcaps have band kernels alone: a band may hide nothing.
inline bool needs_band(const Problem& p) {
  return score_kind(p) == ScoreKind::kSoftcap || may_hide(p);
}

inline RowIndexing indexing_of(const Problem& p) {
  return p.is_ragged() ? RowIndexing::kRagged : RowIndexing::kBySequence;
}

// "fwd_bf16_d192x128_band_128x128", "fwd_fp16_d64_paged_softcap_192x128",
// "fwd_bf16_d128_split_128x128", "fwd_bf16_d128_kv8_128x128", of a row of a tile table.
template <class Config>
std::string kernel_id(const char* family, Element element, const Config& c, int tile_m) {
  const char* keys = "";
  if constexpr (requires { c.paged; })
    keys = c.widened() ? (c.split ? "_kv8_split" : "_kv8")
           : c.split   ? "_split"
           : c.paged   ? "_paged"
                       : "";
  if constexpr (requires { c.lists; })
    if (c.lists) keys = "_lists";
  const char* kind = c.score == ScoreKind::kSoftcap ? "_softcap"
                     : *keys                        ? ""
                     : c.band                       ? "_band"
                                                    : "_full";
  return message(family, "_", short_name(element), "_d", c.head_dim,
                 c.head_dim_v == c.head_dim ? "" : message("x", c.head_dim_v), keys, kind, "_",
                 tile_m, "x", c.tile_n);
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

}  // namespace flash3::cuda::sm90
