// SPDX-License-Identifier: Apache-2.0
// Splits of the keys of a work tile, for blocks that share it: where the query tiles of a sequence
// are too few to fill a GPU. Integers only, host and device: the varlen schedule lists splits as
// work, and a split kernel's scheduler hands them out.
//
// How many splits a sequence has follows from the most queries of the call, its heads and its own
// keys; where they end, from the key tiles that the work tile sees. Neither the batch nor the
// device counts.
#pragma once

#include "cuda/device/tile_schedule.hpp"

namespace flash3::cuda {

// No split of a longer work tile has fewer keys: a split costs about a tenth as much as they do,
// which a batch that fills the GPU anyway pays for nothing. Somewhat less than 4096, so that all
// tiles of a prompt after 16384 keys have four, those too that a mask leaves some fewer.
inline constexpr int kLeastSplitKeys = 3584;
// One warpgroup merges the splits of its rows, one after the other.
inline constexpr int kMostKeySplits = 16;

// Into how many splits at most the keys of each work tile of a sequence with k_length keys are
// split; most: of the call, 0 or 1 if they are not.
FLASH3_HOST_DEVICE constexpr int key_splits(int k_length, int most) {
  return most > 1 ? clamped(k_length / kLeastSplitKeys, 1, most) : 1;
}

// One of `count` splits of a work tile. Splits lie in a ring of slots in the workspace: those of a
// tile from first_slot on.
struct KeySplit {
  int index, count;
  int slot, first_slot;

  // Of the splits for which the list has room some work tiles have fewer: a mask leaves them fewer
  // keys.
  FLASH3_HOST_DEVICE constexpr bool exists() const { return index < count; }
};

// Makes of a work tile its split, of at most split.count.
FLASH3_HOST_DEVICE constexpr void take_key_split(WorkTile& work, int tile_n, KeySplit& split) {
  const int begin = work.key_tile_begin, key_tiles = work.key_tile_end - begin;
  split.count = clamped(key_tiles / (kLeastSplitKeys / tile_n), 1, split.count);
  if (!split.exists()) return;
  work.key_tile_begin = begin + key_tiles * split.index / split.count;
  work.key_tile_end = begin + key_tiles * (split.index + 1) / split.count;
}

}  // namespace flash3::cuda
