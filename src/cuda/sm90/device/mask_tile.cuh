// SPDX-License-Identifier: Apache-2.0
// What kernels that walk the lists of a mask (core/mask_lists.hpp) have in shared memory.
#pragma once

#include "core/mask_lists.hpp"

namespace flash3::cuda::sm90 {

// A tile of a listed block: of keys in the forward, of queries in the backward. The thread that
// loads the tile notes this beside it.
struct alignas(8) MaskTile {
  int tile_and_kind;  // tile · 4 + MaskKind
  int data;           // the block's

  // Tile `part` of the block's kBlockTiles.
  template <int kBlockTiles>
  FLASH3_HOST_DEVICE static constexpr MaskTile of(const MaskBlock& block, int part) {
    return {(block.block() * kBlockTiles + part) << 2 | block.kind(), block.data};
  }
  FLASH3_HOST_DEVICE constexpr int tile() const { return tile_and_kind >> 2; }
  FLASH3_HOST_DEVICE constexpr int kind() const { return tile_and_kind & 3; }
};

// What a forward consumer knows of a work tile's lists: forward/seen_keys.cuh. That of a band knows
// of none.
template <bool kLists>
struct KeysOfTile {};

// Shared memory with what goes with the stages of listed tiles, if there are any.
template <class Shared, class Listed, int kStages, bool kLists>
struct WithListed : Shared {};
template <class Shared, class Listed, int kStages>
struct WithListed<Shared, Listed, kStages, true> : Shared {
  Listed listed[kStages];
};

}  // namespace flash3::cuda::sm90
