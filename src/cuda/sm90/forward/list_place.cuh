// SPDX-License-Identifier: Apache-2.0
// The key tiles of a mask's lists (core/mask_lists.hpp), as producers walk over them.
#pragma once

#include "cuda/sm90/device/mask_tile.cuh"
#include "cuda/sm90/forward/kernel_params.h"
#include "cuda/sm90/forward/traits.cuh"

namespace flash3::cuda::sm90 {

// Shared memory of such a kernel.
template <class Common, ForwardConfig kRow>
  requires(kRow.lists)
struct SharedOf<Common, kRow> : Common {
  MaskTile listed[kRow.stages];  // what goes with the stages of K
};

// Key tiles of a work tile are counted as those of the blocks in the lists.
template <class Traits>
inline constexpr int kBlockTiles = kMaskBlock / Traits::kTileN;

// Gives a work tile the keys of its list.
template <class Traits>
struct KeysOfList {
  const MaskMemory& mask;

  __device__ __forceinline__ void operator()(WorkTile& work) const {
    const MaskList list = *mask.list(work.sequence.batch, work.head_group, work.query / kMaskBlock);
    work.key_tile_begin = list.begin * kBlockTiles<Traits>;
    work.key_tile_end = (list.begin + list.count) * kBlockTiles<Traits>;
  }
};

// A key tile of a list.
template <class Traits>
struct ListPlace {
  static constexpr int kTiles = kBlockTiles<Traits>;
  const MaskMemory& mask;
  int n;  // among the tiles of all lists
  MaskBlock block = {};

  // The n-th: its block.
  __device__ __forceinline__ void read() {
    const int2 x = __ldg(reinterpret_cast<const int2*>(mask.blocks) + n / kTiles);
    block = {x.x, x.y};
  }

  // Goes on to the one before it of which some query of the block sees a key; before `begin`: there
  // is none.
  __device__ __forceinline__ void find_before(int begin) {
    while (--n >= begin) {
      read();
      if (kTiles == 1 || (block.quarters() & quarters_of_keys(n % kTiles)) != 0) return;
    }
  }
  __device__ __forceinline__ MaskTile tile(bool last) const {
    return MaskTile::of<kTiles>(block, n % kTiles, last);
  }
};

}  // namespace flash3::cuda::sm90
