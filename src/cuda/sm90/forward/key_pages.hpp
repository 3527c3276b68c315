// SPDX-License-Identifier: Apache-2.0
// Where the keys of a cache lie, for a kernel that looks it up. Integers only, host and device.
#pragma once

#include "cuda/sm90/forward/kernel_params.h"

namespace flash3::cuda::sm90 {

// A row of an element of K and V.
struct PagePlace {
  int element = 0, row = 0;
};

// Where a key lies. kMayLackTable: without a table, sequence b has element b. Whatever the table
// holds, the place exists; where the sequence ends before the key the table is not read.
template <bool kMayLackTable = false>
FLASH3_HOST_DEVICE constexpr PagePlace place_of_key(const KeyPages& pages,
                                                    const ListedSequence& sequence, int key) {
  if (key >= sequence.k_length) return {};
  const int place = sequence.k_first + key;
  if (kMayLackTable && pages.table == nullptr) return {sequence.batch, place};
  const int number = int(unsigned(place) / unsigned(pages.page_size));
  const int given = pages.table[sequence.batch * pages.stride_table + number],
            element = given < 0                ? 0
                      : given < pages.elements ? given
                                               : pages.elements - 1;
  return {element, place - number * pages.page_size};
}

// The same as a row counted over all elements, as `rows` has them.
template <bool kMayLackTable = false>
FLASH3_HOST_DEVICE constexpr int row_of_key(const KeyPages& pages, const RowMap& rows,
                                            const ListedSequence& sequence, int key) {
  const PagePlace place = place_of_key<kMayLackTable>(pages, sequence, key);
  return place.element * rows.rows_per_batch + place.row;
}

// Rows of the box that begins at a key before the sequence's end: what comes after it must
// read as zeros.
FLASH3_HOST_DEVICE constexpr int rows_left(const KeyPages& pages, const ListedSequence& sequence,
                                           int key) {
  const int left = sequence.k_length - key;
  return left < 0 ? 0 : left < pages.box_rows ? left : pages.box_rows;
}

}  // namespace flash3::cuda::sm90
