// SPDX-License-Identifier: Apache-2.0
// Dropout of attention's weights: which pairs of query and key are kept. That depends on the seed,
// the offset, the batch index, the query head, the query and the key alone: on no tile, kernel,
// split or backend. Host and device, NVRTC too.
//
// Random numbers are those of Philox 4×32 with seven rounds (Salmon et al., SC 2011), which passes
// BigCrush. One evaluation serves a group of eight pairs with 16 bits each:
//
//   queries 16·I + r, 16·I + r + 8    keys 16·J + 2c, 16·J + 2c + 1, and both + 8
//
// for r < 8 and c < 4: those that one thread has of a tile of scores, queries × keys, and two
// threads of one warp have of a transposed tile. Its counter is (4·J + c, 8·I + r, b · heads_q + h,
// 0), its key the first two words of Philox with the seed as key and the offset as counter.
#pragma once

#include "core/arithmetic.hpp"

namespace flash3 {

struct PhiloxWords {
  unsigned word[4];
};

// Two words of 32 bits.
struct PhiloxKey {
  unsigned low, high;
};

FLASH3_HOST_DEVICE constexpr unsigned long long wide_product(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
  // Of a product of zero-extended numbers the compiler adds upper halves of 0.
  unsigned long long product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<unsigned long long>(a) * b;
#endif
}

FLASH3_HOST_DEVICE constexpr PhiloxWords philox(const PhiloxWords& counter, PhiloxKey key) {
  constexpr int kRounds = 7;
  unsigned a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
  for (int round = 0; round < kRounds; ++round) {
    const unsigned long long first = wide_product(a, 0xD2511F53u),
                             second = wide_product(c, 0xCD9E8D57u);
    a = unsigned(second >> 32) ^ b ^ key.low;
    c = unsigned(first >> 32) ^ d ^ key.high;
    b = unsigned(second);
    d = unsigned(first);
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

FLASH3_HOST_DEVICE constexpr PhiloxKey dropout_key(unsigned long long seed,
                                                   unsigned long long offset) {
  const PhiloxWords words = philox({{unsigned(offset), unsigned(offset >> 32), 0, 0}},
                                   {unsigned(seed), unsigned(seed >> 32)});
  return {words.word[0], words.word[1]};
}

// The group of a pair, and the pair's place in it: bits 16·(place % 2) and up of word place / 2.
struct DropoutGroup {
  // From sixteen keys, or queries, to the next.
  static constexpr unsigned kOfKeys = 4, kOfQueries = 8;

  unsigned keys, queries;

  FLASH3_HOST_DEVICE static constexpr DropoutGroup of(int query, int key) {
    return {unsigned(key) / 16 * kOfKeys + unsigned(key) % 8 / 2,
            unsigned(query) / 16 * kOfQueries + unsigned(query) % 8};
  }
  FLASH3_HOST_DEVICE static constexpr int place(int query, int key) {
    return query / 8 % 2 * 4 + key / 8 % 2 * 2 + key % 2;
  }
  // batch_head: b · heads_q + h.
  FLASH3_HOST_DEVICE constexpr PhiloxWords words(unsigned batch_head, PhiloxKey key) const {
    return philox({{keys, queries, batch_head, 0}}, key);
  }
};

FLASH3_HOST_DEVICE constexpr unsigned dropout_bits(const PhiloxWords& words, int place) {
  return words.word[place / 2] >> 16 * (place % 2) & 0xFFFF;
}

// A pair is dropped if its 16 bits are below this number: p to the nearest multiple of 2^-16, but
// below 1. p: in [0, 1).
FLASH3_HOST_DEVICE constexpr unsigned dropout_threshold(double p) {
  const unsigned nearest = unsigned(p * 65536 + 0.5);  // NOLINT: p is not negative
  return nearest < 65536 ? nearest : 65535;
}
// What kept weights are multiplied by, so that the expectation stays.
FLASH3_HOST_DEVICE constexpr float dropout_scale(unsigned threshold) {
  return float(65536.0 / (65536 - threshold));
}

FLASH3_HOST_DEVICE constexpr bool dropout_keeps(PhiloxKey key, unsigned threshold,
                                                unsigned batch_head, int query, int key_of_query) {
  const PhiloxWords words = DropoutGroup::of(query, key_of_query).words(batch_head, key);
  return dropout_bits(words, DropoutGroup::place(query, key_of_query)) >= threshold;
}

}  // namespace flash3
