// SPDX-License-Identifier: Apache-2.0
// The bits of keys that a query row sees under a tree mask. Integers only, host and device.
#pragma once

#include "core/arithmetic.hpp"

namespace flash3::cuda {

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
