// SPDX-License-Identifier: Apache-2.0
// The view of several blocks of 64 keys, of Sᵀ = K·Qᵀ each. Integers only, host and device.
#pragma once

#include "cuda/device/score/view.hpp"

namespace flash3::cuda {

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
