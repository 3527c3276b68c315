// SPDX-License-Identifier: Apache-2.0
// The forward kernels of `flash3 bench --ablation`: the library's kernel with a part of its
// schedule replaced. They are linked into the tools and not into the library.
#pragma once

#include "cuda/sm90/forward/tile_table.hpp"

namespace flash3::device {

// Where the paper measured; fp16, no mask. The tile table has this row, and all variants are
// compared with its kernel.
inline constexpr int kAblationHeadDim = 128;
inline constexpr int kAblationTileN = 128;
// Two tiles of scores: with 96 keys registers spill.
inline constexpr int kThreeStageTileN = 80;
inline constexpr int kFp8SmallTileN = 64;

enum class Variant {
  kSmallTiles,      // the library's schedule in the tiles of the three-stage one; for FP8 in others
  kNoPingPong,      // warpgroups issue their products when they like
  kNoOverlap,       // a warpgroup's softmax runs beside none of its own products
  kNotSpecialised,  // the consumers load, and the producer warpgroup does nothing
  kThreeStage,      // the next Q·Kᵀ runs under a softmax too
  kNoLazyMaximum    // FP8: every score above a row's maximum raises it
};

constexpr int tile_n_of(cuda::Element element, Variant variant) {
  if (variant == Variant::kThreeStage) return kThreeStageTileN;
  if (variant != Variant::kSmallTiles) return kAblationTileN;
  return element == cuda::Element::kE4m3 ? kFp8SmallTileN : kThreeStageTileN;
}

// The library's row with the variant's tile_n.
constexpr cuda::sm90::ForwardConfig ablation_config(cuda::Element element, Variant variant) {
  cuda::sm90::ForwardConfig config =
      cuda::sm90::forward_config(element, kAblationHeadDim, kAblationHeadDim, false,
                                 cuda::ScoreKind::kPlain, 128, kAblationTileN);
  config.tile_n = tile_n_of(element, variant);
  return config.compiled();
}

// The address of one variant's kernel (instances/).
template <cuda::Element kElement, Variant kVariant>
const void* ablation_kernel();

}  // namespace flash3::device
