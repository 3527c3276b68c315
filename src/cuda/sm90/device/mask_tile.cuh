// SPDX-License-Identifier: Apache-2.0
// What kernels that walk the lists of a mask (core/mask_lists.hpp) note of a tile.
#pragma once

#include "core/mask_lists.hpp"

namespace flash3::cuda::sm90 {

// A tile of a listed block: of keys in the forward, of queries in the backward. The thread that
// loads the tile notes this beside it.
struct alignas(8) MaskTile {
  unsigned bits;  // tile · 128 + last · 64 + the block's quarters and kind
  int data;       // the block's

  // Tile `part` of the block's kBlockTiles. last: of the walk over a list.
  template <int kBlockTiles>
  FLASH3_HOST_DEVICE static constexpr MaskTile of(const MaskBlock& block, int part,
                                                  bool last = false) {
    const unsigned tile = block.block() * kBlockTiles + part;
    return {tile << 7 | unsigned(last) << 6 | (unsigned(block.bits) & 63), block.data};
  }
  FLASH3_HOST_DEVICE constexpr int tile() const { return int(bits >> 7); }
  FLASH3_HOST_DEVICE constexpr bool last() const { return (bits >> 6 & 1) != 0; }
  FLASH3_HOST_DEVICE constexpr int quarters() const { return int(bits >> 2) & kAllQuarters; }
  FLASH3_HOST_DEVICE constexpr int kind() const { return int(bits & 3); }
  // Whether a query of this half of the block sees a key of that half.
  FLASH3_HOST_DEVICE constexpr bool sees(int row_half, int key_half) const {
    return (quarters() & quarter_bit(row_half, key_half)) != 0;
  }
};

// Where the producer notes a tile of a stage and consumers read it: all lanes of a warp, of which
// one frees the stage after a __syncwarp. racecheck cannot follow that (tools/cli/sanitizer.hpp).
__device__ __forceinline__ void note_tile(MaskTile& noted, const MaskTile& tile) { noted = tile; }
__device__ __forceinline__ MaskTile noted_tile(const MaskTile& noted) { return noted; }

}  // namespace flash3::cuda::sm90
