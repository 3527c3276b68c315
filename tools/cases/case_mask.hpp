// SPDX-License-Identifier: Apache-2.0
// The mask of a case as data (flash3/mask.h), as an id names it: "mask:" and a source, and what has
// one of its own.
//
//   mask:band    mask:documents    mask:dense    mask:ranges3    mask:blocks64x128    mask:bits
//   mask:bitblocks    bits of some blocks, and which these are
// and what calls are timed with:
//   mask:causal    mask:prefix4096    mask:sinks64x1024: the first 64 keys and the newest 1024
//   mask:lognormal3: documents of log-normal lengths, draw 3 (sequences.hpp)
//   mask:share25of128x64: lists with 25 % of the blocks of each row    mask:coins: random bits
//   mask:dense.b    each sequence has its own;   .h: each query head
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flash3::cases {

enum class CaseMaskSource {
  kNone,
  kBand,
  kRanges,
  kDocuments,
  kDense,
  kBlocks,
  kBits,
  kBitBlocks,
  kCausal,
  kPrefix,
  kSinks,
  kLogNormal,
  kShare,
  kCoins
};

// Whether a source is one that calls are timed with.
constexpr bool is_usual(CaseMaskSource source) { return source >= CaseMaskSource::kCausal; }

struct CaseMask {
  CaseMaskSource source = CaseMaskSource::kNone;
  int64_t ranges = 0;                      // of kRanges
  int64_t block_rows = 0, block_keys = 0;  // of kBlocks and kShare
  int64_t n = 0;       // keys of kPrefix, and the first ones of kSinks; draw; percent of kShare
  int64_t newest = 0;  // keys of kSinks
  bool of_batch = false, of_heads = false;

  bool given() const { return source != CaseMaskSource::kNone; }
  bool operator==(const CaseMask&) const = default;
};

// After "mask:".
std::optional<CaseMask> parse_mask(std::string_view text);
std::string to_text(const CaseMask& mask);

}  // namespace flash3::cases
