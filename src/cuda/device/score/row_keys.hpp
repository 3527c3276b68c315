// SPDX-License-Identifier: Apache-2.0
// What one query row sees: a range of keys, or the bits of a word. Integers only, host and device.
#pragma once

#include "cuda/device/sequence.hpp"

namespace flash3::cuda {

// The keys that a row sees: [first, end), also outside the tensor.
struct RowKeys {
  int first, end;
};

// What a query of a sequence with seq_k keys sees; mask: the sequence's.
template <bool kBand>
FLASH3_HOST_DEVICE constexpr RowKeys keys_of_row(const TileMask& mask, int seq_k, int row) {
  if constexpr (!kBand) return {0, seq_k};
  const int first = mask.first(row), end = mask.end(row);
  return {first, seq_k < end ? seq_k : end};
}

// A bit for each of 64 keys, key first_bit and on: whether a row sees it.
struct KeyBits {
  unsigned low, high;
};

// The bits of one key, or none if it has no bit: words hide nothing before first_bit.
FLASH3_HOST_DEVICE constexpr KeyBits bits_of_key(int key, int first_bit) {
  const int bit = key - first_bit;
  return {bit >= 0 && bit < 32 ? 1u << bit : 0u, bit >= 32 && bit < 64 ? 1u << (bit - 32) : 0u};
}

// What a word hides of the keys from `key` on, of which bit 0 is the first.
FLASH3_HOST_DEVICE constexpr unsigned long long hidden_from(const KeyBits& shown, int first_bit,
                                                            int key) {
  const unsigned long long hidden =
      ~(static_cast<unsigned long long>(shown.high) << 32 | shown.low);
  const int shift = key - first_bit;
  if (shift >= 0) return shift < 64 ? hidden >> shift : 0;
  return shift > -64 ? hidden << -shift : 0;
}

}  // namespace flash3::cuda
