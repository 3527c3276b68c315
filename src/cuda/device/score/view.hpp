// SPDX-License-Identifier: Apache-2.0
// Which query row and key each element of a thread's scores is of: all that masks, modifications of
// scores and the softmax know of a kernel's layout.
//
// Scores come as fragments of WGMMA accumulators of 64 lines, N floats a thread: element 4j + 2h +
// e is of line h, eight further for h = 1, and of column 8j + e, counted from the thread's first.
// Lines are query rows and columns are keys, or, of transposed products, the other way round.
#pragma once

#include "core/arithmetic.hpp"

namespace flash3::cuda {

// A thread has kRows query rows and kKeys keys of each. Row r is row(r) of the tile that the view
// is of, and key k of each row is key(k); at(scores, r, k) is its score. All but row() and key()
// are constants.
template <class View>
concept ScoreView = requires(const View& view, typename View::Scores& scores, float& score, int i) {
  View::kRows;
  View::kKeys;
  score = View::at(scores, i, i);
  View::key_offset(i);
  i = view.row(i);
  i = view.key(i);
};

// Of S = Q·Kᵀ.
template <int N>
struct QueriesByKeys {
  using Scores = float[N];
  static constexpr int kRows = 2, kKeys = N / 2;

  int first_row, first_key;  // of element 0

  FLASH3_HOST_DEVICE static constexpr int element(int r, int k) {
    return k / 2 * 4 + 2 * r + k % 2;
  }
  FLASH3_HOST_DEVICE static constexpr int row_of(int i) { return i / 2 % 2; }
  FLASH3_HOST_DEVICE static constexpr int key_of(int i) { return i / 4 * 2 + i % 2; }
  template <class T>
  FLASH3_HOST_DEVICE static constexpr T& at(T (&scores)[N], int r, int k) {
    return scores[element(r, k)];
  }
  FLASH3_HOST_DEVICE static constexpr int key_offset(int k) { return k / 2 * 8 + k % 2; }
  FLASH3_HOST_DEVICE static constexpr int row_offset(int r) { return 8 * r; }
  FLASH3_HOST_DEVICE constexpr int row(int r) const { return first_row + row_offset(r); }
  FLASH3_HOST_DEVICE constexpr int key(int k) const { return first_key + key_offset(k); }
};

}  // namespace flash3::cuda
