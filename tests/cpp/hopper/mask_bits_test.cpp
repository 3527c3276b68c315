// SPDX-License-Identifier: Apache-2.0
// The bits of a mask a word at a time, as the kernels that make it compute them, against mask_bit()
// pair by pair.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/mask/key_bits.hpp"

namespace flash3::cuda {
namespace {

TEST(KeyBits, OfARangeAreItsKeys) {
  for (int begin : {-2000000000, -128, -1, 0, 1, 31, 32, 33, 64, 95, 96, 127, 128, 2000000000})
    for (int end : {-2000000000, -1, 0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2000000000}) {
      const KeyBits bits = KeyBits::of(begin, end);
      bool any[2] = {false, false}, all[2] = {true, true};
      for (int key = 0; key < kMaskBlock; ++key) {
        const bool inside = begin <= key && key < end;
        ASSERT_EQ(bits.has(key), inside) << "[" << begin << ", " << end << "): " << key;
        any[key / 64] |= inside, all[key / 64] &= inside;
      }
      for (int half = 0; half < 2; ++half) {
        EXPECT_EQ(bits.any(half), any[half]);
        EXPECT_EQ(bits.all(half), all[half]);
      }
    }
}

TEST(KeyBits, OfOctetsAreEightKeysEach) {
  for (unsigned octets = 0; octets < 1u << 16; octets += 97) {
    const KeyBits bits = KeyBits::of_octets(octets);
    for (int key = 0; key < kMaskBlock; ++key)
      ASSERT_EQ(bits.has(key), (octets >> (key / 8) & 1) != 0) << octets << ": " << key;
  }
}

TEST(KeyBits, AreEqualWordByWord) {
  const KeyBits bits = KeyBits::of(3, 100);
  EXPECT_TRUE(bits == KeyBits::of(3, 100));
  for (int key = 0; key < kMaskBlock; ++key) {
    KeyBits other = bits;
    other.words[key / 32] ^= 1u << (key % 32);
    EXPECT_FALSE(bits == other) << key;
  }
}

TEST(MaskWords, HaveABitForEachByte) {
  for (unsigned seen = 0; seen < 16; ++seen)
    for (unsigned value : {1u, 0x7Fu, 0x80u, 0xFFu}) {
      unsigned bytes = 0;
      for (int i = 0; i < 4; ++i)
        if (seen >> i & 1) bytes |= value << (8 * i);
      EXPECT_EQ(nonzero_bytes(bytes), seen) << bytes;
    }
}

TEST(MaskWords, LieWhereMaskBitSays) {
  std::mt19937 random(5);
  KeyBits rows[kMaskBlock];
  for (KeyBits& row : rows)
    for (unsigned& word : row.words) word = unsigned(random());
  std::vector<unsigned> words(kMaskWords);
  std::vector<int> times(kMaskWords);
  for (int lane = 0; lane < 32; ++lane)
    for (int half = 0; half < 2; ++half)
      for (int pair = 0; pair < 2; ++pair)
        for (int part = 0; part < 4; ++part) {
          const int at = words_of_lane(lane, pair, half) + part;
          words[size_t(at)] = mask_word(rows[row_of_lane(lane, 2 * pair)],
                                        rows[row_of_lane(lane, 2 * pair + 1)], half, part);
          ++times[size_t(at)];
        }
  for (int row = 0; row < kMaskBlock; ++row)
    for (int key = 0; key < kMaskBlock; ++key) {
      const MaskBit at = mask_bit(row, key);
      ASSERT_EQ((words[size_t(at.word)] >> at.bit & 1) != 0, rows[row].has(key))
          << row << ", " << key;
    }
  for (int n : times) EXPECT_EQ(n, 1);
}

}  // namespace
}  // namespace flash3::cuda
