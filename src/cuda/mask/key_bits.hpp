// SPDX-License-Identifier: Apache-2.0
// Which keys of a block a query sees: 128 bits. Integers only, host and device.
#pragma once

#include "core/mask_lists.hpp"

namespace flash3::cuda {

struct alignas(16) KeyBits {
  unsigned words[kMaskBlock / 32];

  // Keys [begin, end), counted from the block's first, inside the block or not.
  FLASH3_HOST_DEVICE static constexpr KeyBits of(int begin, int end) {
    KeyBits bits{};
    const int first = clamped_key(begin), last = clamped_key(end);
    for (int w = 0; w < kMaskBlock / 32; ++w) {
      const int from = first > 32 * w ? first - 32 * w : 0,
                to = last < 32 * w + 32 ? last - 32 * w : 32;
      if (from < to) bits.words[w] = ~0u >> (32 - (to - from)) << from;
    }
    return bits;
  }
  // Eight keys for each of 16 bits.
  FLASH3_HOST_DEVICE static constexpr KeyBits of_octets(unsigned octets) {
    KeyBits bits{};
    for (int w = 0; w < kMaskBlock / 32; ++w)
      bits.words[w] = ((octets >> (4 * w) & 0xF) * 0x00204081u & 0x01010101u) * 0xFF;
    return bits;
  }

  // Of a half of the block: 64 keys.
  FLASH3_HOST_DEVICE constexpr bool any(int half) const {
    return (words[2 * half] | words[2 * half + 1]) != 0;
  }
  FLASH3_HOST_DEVICE constexpr bool all(int half) const {
    return (words[2 * half] & words[2 * half + 1]) == ~0u;
  }
  FLASH3_HOST_DEVICE constexpr bool operator==(const KeyBits& other) const {
    return ((words[0] ^ other.words[0]) | (words[1] ^ other.words[1]) |
            (words[2] ^ other.words[2]) | (words[3] ^ other.words[3])) == 0;
  }
  FLASH3_HOST_DEVICE constexpr void add(const KeyBits& other) {
    for (int w = 0; w < kMaskBlock / 32; ++w) words[w] |= other.words[w];
  }
  FLASH3_HOST_DEVICE constexpr void keep(const KeyBits& other) {
    for (int w = 0; w < kMaskBlock / 32; ++w) words[w] &= other.words[w];
  }
  FLASH3_HOST_DEVICE constexpr bool has(int key) const {
    return (words[key / 32] >> (key % 32) & 1) != 0;
  }

 private:
  FLASH3_HOST_DEVICE static constexpr int clamped_key(int key) {
    return key < 0 ? 0 : key < kMaskBlock ? key : kMaskBlock;
  }
};

// A bit for each of four bytes that is not 0, the lowest byte's first.
FLASH3_HOST_DEVICE constexpr unsigned nonzero_bytes(unsigned bytes) {
  const unsigned high = (((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | bytes) & 0x80808080u;
  return (high >> 7) * 0x01020408u >> 24;
}

// ---- mask_bit() by the word: two queries 8 apart, of the block's key half `half` ----

// A warp has a block's rows so that a lane can write whole words: each of the lane's two pairs of
// rows, 8 apart, has four words side by side in each half.
FLASH3_HOST_DEVICE constexpr int row_of_lane(int lane, int i) {
  return i / 2 * 64 + lane / 8 * 16 + lane % 8 + i % 2 * 8;
}
FLASH3_HOST_DEVICE constexpr int words_of_lane(int lane, int pair, int half) {
  return half * 256 + (pair * 32 + lane) * 4;
}
// Bits 2·part and 2·part + 1 of each byte, side by side.
FLASH3_HOST_DEVICE constexpr unsigned pairs_of_bytes(unsigned word, int part) {
  return (word >> (2 * part) & 0x03030303u) * 0x01041040u >> 24;
}
// Word `part` of the four.
FLASH3_HOST_DEVICE constexpr unsigned mask_word(const KeyBits& row, const KeyBits& eight_further,
                                                int half, int part) {
  return pairs_of_bytes(row.words[2 * half], part) |
         pairs_of_bytes(row.words[2 * half + 1], part) << 8 |
         pairs_of_bytes(eight_further.words[2 * half], part) << 16 |
         pairs_of_bytes(eight_further.words[2 * half + 1], part) << 24;
}

}  // namespace flash3::cuda
