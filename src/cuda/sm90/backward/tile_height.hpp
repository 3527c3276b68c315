// SPDX-License-Identifier: Apache-2.0
// The small kernels are instantiated for every query-tile height of the tile table.
#pragma once

#include <type_traits>

#include "cuda/sm90/backward/tile_table.hpp"

namespace flash3::cuda::sm90 {

// Calls f(constant) with tile_m as a constant: one copy of f for each height of the table. Calls
// nothing for another height.
template <int kRow = 0, class F>
void with_tile_height(int tile_m, const F& f) {
  if constexpr (kRow < int(sizeof(kBackwardConfigs) / sizeof(kBackwardConfigs[0]))) {
    constexpr int kTileM = kBackwardConfigs[kRow].tile_m;
    if (tile_m == kTileM) {
      f(std::integral_constant<int, kTileM>{});
    } else {
      with_tile_height<kRow + 1>(tile_m, f);
    }
  }
}

}  // namespace flash3::cuda::sm90
