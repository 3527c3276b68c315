// SPDX-License-Identifier: Apache-2.0
// Where the keys of a cache lie, for a kernel that looks it up. Integers only, host and device.
#pragma once

#include "cuda/device/sequence.hpp"
#include "cuda/device/views.h"

namespace flash3::cuda::sm90 {

// A row of an element of K and V.
struct PagePlace {
  int element = 0, row = 0;
};

// Key j of sequence b lies in element table[b][j / page_size] of K and V.
struct KeyPages {
  const int* table;
  long long stride_table;  // from sequence to sequence
  int page_size;
  int elements;  // of K and V
  int box_rows;  // rows of a key tile that TMA loads at once: they never lie in two elements

  // Where a key lies. Whatever the table holds, the place exists; where the sequence ends before
  // the key the table is not read. kMayLackTable: without one, sequence b has element b.
  template <bool kMayLackTable = false>
  FLASH3_HOST_DEVICE PagePlace place_of_key(const ListedSequence& sequence, int key) const {
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

  // The same as a row counted over all elements, as `rows` has them.
  template <bool kMayLackTable = false>
  FLASH3_HOST_DEVICE int row_of_key(const RowMap& rows, const ListedSequence& sequence,
                                    int key) const {
    const PagePlace place = place_of_key<kMayLackTable>(sequence, key);
    return place.element * rows.rows_per_batch + place.row;
  }

  // Rows of the box that begins at a key in front of the sequence's end: what comes behind it must
  // read as zeros.
  FLASH3_HOST_DEVICE int rows_left(const ListedSequence& sequence, int key) const {
    const int left = sequence.k_length - key;
    return left < 0 ? 0 : left < box_rows ? left : box_rows;
  }
};

}  // namespace flash3::cuda::sm90
