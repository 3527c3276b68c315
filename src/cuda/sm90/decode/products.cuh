// SPDX-License-Identifier: Apache-2.0
// The two transposed products of a decode kernel (traits.cuh) on 16-bit K and V, of one
// warpgroup.
#pragma once

#include "cuda/sm90/decode/traits.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// Issues S = K·Qᵀ and commits it as one group. Element i of block b of r_s is key 64·b + 16·warp +
// lane / 4 + 8·(i / 2 % 2) and query row 8·(i / 4) + 2·(lane % 4) + i % 2.
template <class Traits>
__device__ __forceinline__ void issue_scores(float (&r_s)[Traits::kKeyBlocks][Traits::kRows / 2],
                                             Descriptor k, Descriptor q) {
  using KTile = typename Traits::KTile;
  using QTile = typename Traits::QTile;
#pragma unroll
  for (int b = 0; b < Traits::kKeyBlocks; ++b) mark_undefined(r_s[b]);
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < Traits::kKeyBlocks; ++b)
#pragma unroll
    for (int col = 0; col < KTile::kCols; col += KTile::kStep)
      Wgmma<Traits::kElement, Traits::kRows>::ss(r_s[b],
                                                 k + b * 64 * KTile::kRowBytes + KTile::k_step(col),
                                                 q + QTile::k_step(col), col != 0);
  wgmma_commit();
}

// Issues O += Vᵀ·P and commits it as one group.
template <class Traits>
__device__ __forceinline__ void issue_output(float (&r_o)[Traits::kDimBlocks][Traits::kRows / 2],
                                             Descriptor v, Descriptor p) {
  using VTile = typename Traits::VTile;
  using PTile = typename Traits::PTile;
#pragma unroll
  for (int b = 0; b < Traits::kDimBlocks; ++b) fence_operand(r_o[b]);
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < Traits::kDimBlocks; ++b)
#pragma unroll
    for (int key = 0; key < Traits::kTileN; key += 16)
      Wgmma<Traits::kElement, Traits::kRows>::template ss<true, false>(
          r_o[b], v + b * 64 / VTile::kChunk * VTile::kChunkBytes + VTile::mn_step(key),
          p + PTile::k_step(key), true);
  wgmma_commit();
}

}  // namespace flash3::cuda::sm90
