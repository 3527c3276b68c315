// SPDX-License-Identifier: Apache-2.0
// What a block that shares an item with others leaves of it for whom. Integers only, host and
// device: the schedule lists it, and the tests try it out.
//
// A fold that several blocks compute is merged by the one that ends it, the item by the one that
// has the sequence's last split: nobody waits for a block behind itself.
#pragma once

#include "hopper/decode/work.hpp"

namespace flash3::hopper {

// A block's slots: single splits and then folds from 0 on; at the end, counted from there, the
// shared fold that it has merged, and of whoever has the sequence's first split the finished folds
// and the one begun.
inline constexpr int kMergedFoldSlot = 3, kFirstFoldsSlot = 2, kBegunFoldSlot = 1;

constexpr int slots_of_block(int most_splits) {
  return kSplitsPerFold - 1 + ceil_div(most_splits, kSplitsPerFold) + 1 + kMergedFoldSlot;
}

// Some slots of a block: one that stands alone, or none, and then consecutive ones.
struct BlockSlots {
  int lone = -1, first = 0, count = 0;

  FLASH3_HOST_DEVICE constexpr int size() const { return (lone >= 0) + count; }
};

// What a block computes of an item, in splits from the item's first, and in which slots it leaves
// what: whoever has the sequence's first split its finished folds as one, and the one begun;
// another the single splits up to the next fold, and then its folds.
struct BlockShare {
  int begin, end;
  bool is_first;

  // Of an item of these splits, and a block that has those from `from` to `to` of the sequence.
  FLASH3_HOST_DEVICE static constexpr BlockShare of(const TileMask::Range& splits, bool is_first,
                                                    int from, int to) {
    const int begin = clamped(from - splits.begin, 0, splits.size());
    return {begin, clamped(to - splits.begin, begin, splits.size()), is_first};
  }

  // Folds that end in front of its end, of an item of so many splits.
  FLASH3_HOST_DEVICE constexpr int ended(int splits) const {
    return end == splits ? ceil_div(end, kSplitsPerFold) : end / kSplitsPerFold;
  }
  // Whether it ends a fold that others begin: number begin / kSplitsPerFold.
  FLASH3_HOST_DEVICE constexpr bool ends_shared_fold(int splits) const {
    return begin < end && begin % kSplitsPerFold != 0 && begin / kSplitsPerFold < ended(splits);
  }

  // Of its part of a fold, or its parts, if no block has the whole.
  FLASH3_HOST_DEVICE constexpr BlockSlots slots_of_fold(int fold, int slots) const {
    const int fold_begin = fold * kSplitsPerFold, fold_end = fold_begin + kSplitsPerFold;
    if (begin == end || end <= fold_begin || begin >= fold_end) return {};
    if (is_first) return {-1, slots - kBegunFoldSlot, 1};
    if (begin > fold_begin) return {-1, 0, (end < fold_end ? end : fold_end) - begin};
    return {-1, fold_slot(fold), 1};
  }
  // Of the folds that it ends, of the first so many of the item.
  FLASH3_HOST_DEVICE constexpr BlockSlots slots_of_folds(int folds, int splits, int slots) const {
    const int all = ended(splits), last = all < folds ? all : folds;
    if (begin == end || last <= begin / kSplitsPerFold) return {};
    if (is_first) return {-1, slots - kFirstFoldsSlot, 1};
    const int whole = ceil_div(begin, kSplitsPerFold);
    return {ends_shared_fold(splits) ? slots - kMergedFoldSlot : -1, fold_slot(whole),
            last - whole};
  }

 private:
  // Of a fold that begins in it.
  FLASH3_HOST_DEVICE constexpr int fold_slot(int fold) const {
    const int whole = ceil_div(begin, kSplitsPerFold);
    return whole * kSplitsPerFold - begin + fold - whole;
  }
};

}  // namespace flash3::hopper
