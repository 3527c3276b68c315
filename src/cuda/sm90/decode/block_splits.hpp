// SPDX-License-Identifier: Apache-2.0
// Several blocks may share an item. This file says which partials each leaves in the workspace, and
// which of them make up a fold, and the item. Integers only, host and device: the schedule lists
// it, and the tests try it out.
//
// Merging a fold belongs to the block that ends it, merging the item to the one with its last split
// (merge_splits.cuh). So all partials are of blocks with lower numbers, or its own.
#pragma once

#include "cuda/sm90/decode/work.hpp"

namespace flash3::cuda::sm90 {

// A partial lies in a slot of its block. Slots from 0 on hold single splits and then whole folds.
// The last three, counted from the end, hold the shared fold that the block ends, merged, and, of
// the block with the sequence's first split, the folds that it has finished and the one that it
// began.
inline constexpr int kMergedFoldSlot = 3, kFirstFoldsSlot = 2, kBegunFoldSlot = 1;

constexpr int slots_of_block(int most_splits) {
  return kSplitsPerFold - 1 + ceil_div(most_splits, kSplitsPerFold) + 1 + kMergedFoldSlot;
}

// Some slots of a block, in the order in which they are merged: `lone` if it is not -1, then
// `count` from `first` on.
struct BlockSlots {
  int lone = -1, first = 0, count = 0;

  FLASH3_HOST_DEVICE constexpr int size() const { return (lone >= 0) + count; }
};

// The splits of an item that a block computes, counted from the item's first, and the slots that it
// leaves them in. The block with the sequence's first split leaves its finished folds as one
// partial and the one that it began as another. Any other block leaves single splits up to the next
// fold, then folds.
struct BlockSplits {
  int begin, end;
  bool is_first;

  // Of an item of these splits, where the block has the sequence's from `from` to `to`.
  FLASH3_HOST_DEVICE static constexpr BlockSplits of(const TileMask::Range& splits, bool is_first,
                                                     int from, int to) {
    const int begin = clamped(from - splits.begin, 0, splits.size());
    return {begin, clamped(to - splits.begin, begin, splits.size()), is_first};
  }

  // How many folds end in these splits or before them, if the item has so many splits.
  FLASH3_HOST_DEVICE constexpr int ended(int splits) const {
    return end == splits ? ceil_div(end, kSplitsPerFold) : end / kSplitsPerFold;
  }
  // Whether it ends a fold that another block begins: fold begin / kSplitsPerFold.
  FLASH3_HOST_DEVICE constexpr bool ends_shared_fold(int splits) const {
    return begin < end && begin % kSplitsPerFold != 0 && begin / kSplitsPerFold < ended(splits);
  }

  // The slots with its partials of a fold that no block has whole.
  FLASH3_HOST_DEVICE constexpr BlockSlots slots_of_fold(int fold, int slots) const {
    const int fold_begin = fold * kSplitsPerFold, fold_end = fold_begin + kSplitsPerFold;
    if (begin == end || end <= fold_begin || begin >= fold_end) return {};
    if (is_first) return {-1, slots - kBegunFoldSlot, 1};
    if (begin > fold_begin) return {-1, 0, (end < fold_end ? end : fold_end) - begin};
    return {-1, fold_slot(fold), 1};
  }
  // The slots with the folds that it ends, among the first `folds` of the item.
  FLASH3_HOST_DEVICE constexpr BlockSlots slots_of_folds(int folds, int splits, int slots) const {
    const int all = ended(splits), last = all < folds ? all : folds;
    if (begin == end || last <= begin / kSplitsPerFold) return {};
    if (is_first) return {-1, slots - kFirstFoldsSlot, 1};
    const int whole = ceil_div(begin, kSplitsPerFold);
    return {ends_shared_fold(splits) ? slots - kMergedFoldSlot : -1, fold_slot(whole),
            last - whole};
  }

 private:
  // The slot of a fold that begins in these splits.
  FLASH3_HOST_DEVICE constexpr int fold_slot(int fold) const {
    const int whole = ceil_div(begin, kSplitsPerFold);
    return whole * kSplitsPerFold - begin + fold - whole;
  }
};

}  // namespace flash3::cuda::sm90
