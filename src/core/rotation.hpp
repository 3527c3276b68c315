// SPDX-License-Identifier: Apache-2.0
// The rotation that spreads the outliers of q and k over their head dim before they become FP8: x
// becomes x·D·H/√n. Both sides get the same one, and D·H/√n is orthogonal, so that q·k stays. A
// head dim that is no power of two is cut into powers of two, the largest first, each with its own
// H. Compiled on the host and, through NVRTC too, on the device: nothing of std:: here.
#pragma once

#include "core/arithmetic.hpp"

namespace flash3 {

// Word w of the signs: output w of SplitMix64 (Steele, Lea, Flood 2014) started at `seed`. A
// counter makes it, so that any lane has its signs without those before.
FLASH3_HOST_DEVICE constexpr unsigned long long rotation_word(unsigned long long seed, int w) {
  unsigned long long z = seed + (static_cast<unsigned long long>(w) + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// D's sign of dimension i: −1 where bit i % 64 of word i / 64 is set.
FLASH3_HOST_DEVICE constexpr bool rotation_negates(unsigned long long seed, int i) {
  return (rotation_word(seed, i / 64) >> (i % 64) & 1) != 0;
}

// The transform that dimension i of `dim` takes part in: `size` dimensions from `begin`.
struct RotationPart {
  int begin = 0, size = 0;
};

FLASH3_HOST_DEVICE constexpr RotationPart rotation_part(int dim, int i) {
  int begin = 0;
  for (int size = 1 << 30; size > 0; size /= 2) {
    if ((dim & size) == 0) continue;
    if (i < begin + size) return {begin, size};
    begin += size;
  }
  return {};
}

}  // namespace flash3
