// SPDX-License-Identifier: Apache-2.0
// A bias of each pair, or its gradient, as the copy engine finds it: what a kernel is told of it,
// and what its tiles take of shared memory. Host and device, so no <cstdint>.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

// Of 16 bits, with strides that TMA takes.
struct BiasTiles {
  TensorMap map;       // [batches, rows, heads, keys]
  int batches, heads;  // 1: one serves all
  int box_rows;        // those of a tile; 1: one row serves all queries; 0: no tile is loaded
};

// Keys of a box: the width of the swizzle.
inline constexpr int kBiasBoxKeys = 64;

// Stages of a forward kernel's ring of tiles: the next tile comes while the consumer is at work
// with what it has read of this one.
inline constexpr int kBiasStages = 1;

}  // namespace flash3::cuda::sm90
