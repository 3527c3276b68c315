// SPDX-License-Identifier: Apache-2.0
// The mask of a case as data (flash3/mask.h), as an id names it: "mask:" and a source, and what has
// one of its own.
//
//   mask:band    mask:documents    mask:dense    mask:ranges3    mask:blocks64x128    mask:bits
//   mask:bitblocks    bits of some blocks, and which these are
//   mask:dense.b    each sequence has its own;   .h: each query head
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flash3::cases {

enum class CaseMaskSource { kNone, kBand, kRanges, kDocuments, kDense, kBlocks, kBits, kBitBlocks };

struct CaseMask {
  CaseMaskSource source = CaseMaskSource::kNone;
  int64_t ranges = 0;                      // of kRanges
  int64_t block_rows = 0, block_keys = 0;  // of kBlocks
  bool of_batch = false, of_heads = false;

  bool given() const { return source != CaseMaskSource::kNone; }
  bool operator==(const CaseMask&) const = default;
};

// Behind "mask:".
std::optional<CaseMask> parse_mask(std::string_view text);
std::string to_text(const CaseMask& mask);

}  // namespace flash3::cases
