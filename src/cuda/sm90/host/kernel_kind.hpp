// SPDX-License-Identifier: Apache-2.0
// Which kind of kernel a call needs, by its mask, its scores and its rows, and what kernels are
// called. One place for forward and backward.
#pragma once

#include <algorithm>
#include <array>
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

// Whether there may be keys that no query of their sequence sees, before the first query's
// window or chunk.
inline bool may_hide_keys(const Problem& p) {
  const Index longest = std::max(p.seq_q, p.seq_k);
  const MaskRule& rule = p.mask_rule;
  return (rule.window_left >= 0 && rule.window_left < longest - 1) ||
         (rule.chunk > 0 && rule.chunk < longest);
}

constexpr TileMaskRule tile_mask_rule(const MaskRule& rule) { return rule.narrowed(kMaxLength); }

// What makes scores depend on their place, or drops weights, by the name of its option.
struct BiasTerm {
  BiasTerms term;
  const char* name;
  bool given;
};
using BiasList = std::array<BiasTerm, 4>;
inline BiasList bias_terms(const Problem& p) {
  return {{{BiasTerms::kSlopes, "alibi_slopes", p.alibi_slopes.given},
           {BiasTerms::kTable, "bias_table", p.bias_table.given},
           {BiasTerms::kPairs, "bias", p.bias.given},
           {BiasTerms::kDropout, "dropout_p", p.dropout.given()}}};
}
inline bool is_biased(const Problem& p) {
  return std::ranges::any_of(bias_terms(p), &BiasTerm::given);
}
// The first that is given; one is.
inline const char* bias_name(const Problem& p) {
  const BiasList terms = bias_terms(p);
  return std::ranges::find_if(terms, &BiasTerm::given)->name;
}
// What kernel of biased scores suits best: one for the one term that there is, or for any.
inline BiasTerms terms_of(const Problem& p) {
  const BiasList terms = bias_terms(p);
  if (!is_biased(p)) return BiasTerms::kNone;
  if (p.softcap > 0.f || std::ranges::count_if(terms, &BiasTerm::given) != 1)
    return BiasTerms::kAny;
  return std::ranges::find_if(terms, &BiasTerm::given)->term;
}

inline ScoreKind score_kind(const Problem& p) {
  return p.softcap > 0.f ? ScoreKind::kSoftcap : ScoreKind::kPlain;
}

// Whether a row of a tile table computes the call's scores.
template <class Config>
bool takes_scores(const Config& c, const Problem& p) {
  if (!is_biased(p)) return c.terms == BiasTerms::kNone && c.score == score_kind(p);
  return c.terms == BiasTerms::kAny || c.terms == terms_of(p);
}

// Scores that are not plain have band kernels alone: a band may hide nothing.
inline bool needs_band(const Problem& p) {
  return score_kind(p) != ScoreKind::kPlain || is_biased(p) || may_hide(p);
}

inline RowIndexing indexing_of(const Problem& p) {
  return p.is_ragged() ? RowIndexing::kRagged : RowIndexing::kBySequence;
}

constexpr const char* suffix_of(BiasTerms terms) {
  switch (terms) {
    case BiasTerms::kNone: return "";
    case BiasTerms::kAny: return "_biased";
    case BiasTerms::kSlopes: return "_slopes";
    case BiasTerms::kTable: return "_table";
    case BiasTerms::kPairs: return "_pairs";
    case BiasTerms::kDropout: return "_dropout";
  }
  return "";
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
    if (c.lists) keys = *keys ? "_lists_paged" : "_lists";
  const char* kind = c.score == ScoreKind::kSoftcap ? "_softcap"
                     : c.terms != BiasTerms::kNone  ? suffix_of(c.terms)
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
