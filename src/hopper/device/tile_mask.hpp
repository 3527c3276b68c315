// SPDX-License-Identifier: Apache-2.0
// The mask as the kernels compute it, in 32-bit integers. Host and device.
#pragma once

#include "core/mask.hpp"

namespace flash3::hopper {

// Rows, keys, the mask's bounds and their sums are 32-bit in the kernels.
inline constexpr int kMaxLength = 1 << 30;
using TileMask = MaskOf<int>;
using TileMaskRule = MaskRuleOf<int>;

// A window or a chunk as wide as any sequence is none.
constexpr TileMaskRule tile_mask_rule(const MaskRule& rule) {
  const auto window = [](Index w) { return w < kMaxLength ? int(w) : -1; };
  return {window(rule.window_left), window(rule.window_right),
          int(rule.chunk < kMaxLength ? rule.chunk : kMaxLength)};
}

}  // namespace flash3::hopper
