// SPDX-License-Identifier: Apache-2.0
// What a forward kernel is launched with: one structure for all, of which each reads what its row
// needs. Host and device.
#pragma once

#include "core/mask_lists.hpp"
#include "cuda/device/score/bias.hpp"
#include "cuda/sm90/device/bias_tiles.hpp"
#include "cuda/sm90/forward/params_fp8.h"

namespace flash3::cuda::sm90 {

// What paged kernels alone have (key_pages.hpp): key j of sequence b lies in element table[b][j /
// page_size] of K and V.
struct KeyPages {
  const int* table;
  long long stride_table;  // from sequence to sequence
  int page_size;
  int elements;  // of K and V
  int box_rows;  // rows of a key tile that TMA loads at once: they never lie in two elements
};

// What split kernels alone have: the ring of slots in which splits lie, in the workspace. Each has
// float4 [warpgroups][head_dim_v / 8][128] of O and float4 [warpgroups][128] of maxima and sums, as
// threads hold them.
struct SplitSlots {
  int most;        // splits of a work tile; 1: all else is unused
  int bits, mask;  // there are 2^bits slots; mask: that less one
  void *out, *max_and_sum;
  int* arrived;  // [slots, warpgroups]: splits that are there of the tile that begins in it
  int* freed;    // [slots]: warpgroups that have done with the splits that lay in the slot, in all
};

struct ForwardKernelParams : ScaledForwardParams {
  KeyPages pages;        // only of a paged kernel
  SplitSlots splits;     // only of a split kernel
  MaskMemory mask;       // only of a kernel that walks lists
  BiasParams biased;     // only of a kernel of biased scores
  BiasTiles bias_tiles;  // only of a kernel of a bias of each pair
};

// The roles of such kernels have what all kernels' roles have.
FLASH3_HOST_DEVICE constexpr const ForwardKernelParams& kernel_params(const ForwardParams& params) {
  return static_cast<const ForwardKernelParams&>(params);
}

}  // namespace flash3::cuda::sm90
