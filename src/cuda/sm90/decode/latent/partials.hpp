// SPDX-License-Identifier: Apache-2.0
// How the partials of shared items lie in the workspace: headers of all blocks, then their rows of
// O, then their sums, then their largest scores. Host and device.
#pragma once

#include "cuda/sm90/decode/config.hpp"

namespace flash3::cuda::sm90 {

// What a block leaves of the items that it shares.
struct alignas(32) LatentPartials {
  int begins;  // whether it has the first keys of an item that others go on with:
  int batch, head_group, q_row, rows;
  int continues;  // whether it goes on with the item of a block before it,
  int ends;       // and has its last keys
};

enum class LatentSlot : int { kContinued = 0, kBegun = 1 };
inline constexpr int kLatentSlots = 2;
inline constexpr int kLatentPartialFloats = kLatentConfig.rows * kLatentConfig.head_dim_v;

FLASH3_HOST_DEVICE constexpr int latent_headers_bytes(int blocks) {
  return blocks * int(sizeof(LatentPartials));
}

FLASH3_HOST_DEVICE constexpr long long latent_partials_bytes(int blocks) {
  return latent_headers_bytes(blocks) + static_cast<long long>(blocks) * kLatentSlots *
                                            (kLatentPartialFloats + 3 * kLatentConfig.rows) * 4;
}

}  // namespace flash3::cuda::sm90
