// SPDX-License-Identifier: Apache-2.0
// The views of Sᵀ = K·Qᵀ, and of several blocks of 64 keys of it. Integers only, host and device.
#pragma once

#include "cuda/device/score/view.hpp"

namespace flash3::cuda {

template <int N>
struct KeysByQueries {
  using Scores = float[N];
  static constexpr int kRows = N / 2, kKeys = 2;

  int first_row, first_key;  // of element 0

  FLASH3_HOST_DEVICE static constexpr int row_of(int i) { return i / 4 * 2 + i % 2; }
  FLASH3_HOST_DEVICE static constexpr int key_of(int i) { return i / 2 % 2; }
  template <class T>
  FLASH3_HOST_DEVICE static constexpr T& at(T (&scores)[N], int r, int k) {
    return scores[r / 2 * 4 + 2 * k + r % 2];
  }
  FLASH3_HOST_DEVICE static constexpr int row_offset(int r) { return r / 2 * 8 + r % 2; }
  FLASH3_HOST_DEVICE static constexpr int key_offset(int k) { return 8 * k; }
  FLASH3_HOST_DEVICE constexpr int row(int r) const { return first_row + row_offset(r); }
  FLASH3_HOST_DEVICE constexpr int key(int k) const { return first_key + key_offset(k); }
};

// Block after block.
template <int kBlocks, int N>
struct KeyBlocks {
  using Block = KeysByQueries<N>;
  using Scores = float[kBlocks][N];
  static constexpr int kRows = Block::kRows, kKeys = kBlocks * Block::kKeys;

  int first_row, first_key;

  template <class T>
  FLASH3_HOST_DEVICE static constexpr T& at(T (&scores)[kBlocks][N], int r, int k) {
    return Block::at(scores[k / Block::kKeys], r, k % Block::kKeys);
  }
  FLASH3_HOST_DEVICE static constexpr int key_offset(int k) {
    return k / Block::kKeys * 64 + Block::key_offset(k % Block::kKeys);
  }
  FLASH3_HOST_DEVICE constexpr int row(int r) const { return first_row + Block::row_offset(r); }
  FLASH3_HOST_DEVICE constexpr int key(int k) const { return first_key + key_offset(k); }
};

}  // namespace flash3::cuda
