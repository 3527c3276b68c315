// SPDX-License-Identifier: Apache-2.0
// Where the keys of a cache lie, for a kernel that looks it up. Integers only, host and device.
#pragma once

#include "cuda/sm90/forward/params.h"

namespace flash3::cuda::sm90 {

// A row of an element of K and V.
struct PagePlace {
  int element = 0, row = 0;
};

// Whatever the table holds, the place exists; where the sequence ends before the key the table is
// not read.
template <bool kMayLackTable>
FLASH3_HOST_DEVICE constexpr PagePlace KeyPages::place_of_key(const ListedSequence& sequence,
                                                              int key) const {
  if (key >= sequence.k_length) return {};
  const int place = sequence.k_first + key;
  if (kMayLackTable && table == nullptr) return {sequence.batch, place};
  const int number = int(unsigned(place) / unsigned(page_size));
  const int given = table[sequence.batch * stride_table + number], element = given < 0 ? 0
                                                                             : given < elements
                                                                                 ? given
                                                                                 : elements - 1;
  return {element, place - number * page_size};
}

template <bool kMayLackTable>
FLASH3_HOST_DEVICE constexpr int KeyPages::row_of_key(const RowMap& rows,
                                                      const ListedSequence& sequence,
                                                      int key) const {
  const PagePlace place = place_of_key<kMayLackTable>(sequence, key);
  return place.element * rows.rows_per_batch + place.row;
}

FLASH3_HOST_DEVICE constexpr int KeyPages::rows_left(const ListedSequence& sequence,
                                                     int key) const {
  const int left = sequence.k_length - key;
  return left < 0 ? 0 : left < box_rows ? left : box_rows;
}

}  // namespace flash3::cuda::sm90
