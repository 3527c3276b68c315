// SPDX-License-Identifier: Apache-2.0
// Steele and Vigna's SplitMix64: a generator that is a line in other languages too.
#pragma once

#include <cstdint>

namespace flash3::cases {

// A bijection that makes random bits of a counter.
inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline uint64_t next_bits(uint64_t* state) {
  const uint64_t bits = mix(*state);
  *state += 0x9E3779B97F4A7C15;
  return bits;
}

}  // namespace flash3::cases
