// SPDX-License-Identifier: Apache-2.0
// The two transposed products of a decode kernel (traits.cuh) on K and V in e4m3, of one warpgroup.
//
// A product of e4m3 would want V transposed and weights in e4m3, which have three bits. So each
// warp brings its part of K and V to float16, exactly, in registers, which are the A operand of
// products in float16. Which dims and keys a thread has there is ours to choose, as long as Q and O
// follow:
//
//   K   a thread has 16 bytes of a row, four consecutive dims for each step of 16 (column_of_dim)
//   V   ldmatrix transposes pairs of dims, so that rows r and r + 8 of O are neighbours (dim_of)
#pragma once

#include "cuda/device/ptx/e4m3.cuh"
#include "cuda/sm90/decode/traits.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// The first step of 16 columns of Q that the 16 bytes from `dim` on belong to, and the thread of
// four that has them. Threads have neighbouring pieces of 16 bytes, or every second one, such that
// no two of a load's rows meet in one bank.
template <class KTile>
FLASH3_HOST_DEVICE constexpr int group_of_dim(int dim) {
  return KTile::kChunk == 128 ? dim / 128 * 2 + dim / 16 % 2 : dim / 64;
}
template <class KTile>
FLASH3_HOST_DEVICE constexpr int thread_of_dim(int dim) {
  return KTile::kChunk == 128 ? dim % 128 / 32 : dim % 64 / 16;
}

// The column of Q in shared memory that holds this dim.
template <class KTile>
FLASH3_HOST_DEVICE constexpr int column_of_dim(int dim) {
  const int step = 4 * group_of_dim<KTile>(dim) + dim % 16 / 4;
  return 16 * step + 2 * thread_of_dim<KTile>(dim) + dim % 2 + dim % 4 / 2 * 8;
}

template <class Traits>
struct Fp8Products {
  using Scores = float[Traits::kKeyBlocks][Traits::kRows / 2];
  using Output = float[Traits::kDimBlocks][Traits::kRows / 2];
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  static constexpr int kDimSteps = Traits::kHeadDim / 16, kKeySteps = Traits::kTileN / 16;

  // Issues S = K·Qᵀ, as products.cuh has it, and commits it as one group. The warps have read K,
  // and below V, when this ends.
  __device__ __forceinline__ void issue_scores(Scores& r_s, const uint8_t* shared_k, Descriptor q,
                                               int thread) {
    using QTile = typename Traits::QTile;
    load_keys(shared_k, thread);
#pragma unroll
    for (int b = 0; b < Traits::kKeyBlocks; ++b) {
      mark_undefined(r_s[b]);
#pragma unroll
      for (int step = 0; step < kDimSteps; ++step) fence_operand(r_k_[b][step]);
    }
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < Traits::kKeyBlocks; ++b)
#pragma unroll
      for (int step = 0; step < kDimSteps; ++step)
        Wgmma<Traits::kElement, Traits::kRows>::template rs<false>(
            r_s[b], r_k_[b][step], q + QTile::k_step(16 * step), step != 0);
    wgmma_commit();
  }

  // Issues O += Vᵀ·P and commits it as one group.
  __device__ __forceinline__ void issue_output(Output& r_o, const uint8_t* shared_v, Descriptor p,
                                               int thread) {
    using PTile = typename Traits::PTile;
    load_values(shared_v, thread);
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b) {
      fence_operand(r_o[b]);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) fence_operand(r_v_[b][step]);
    }
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b)
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step)
        Wgmma<Traits::kElement, Traits::kRows>::template rs<false>(
            r_o[b], r_v_[b][step], p + PTile::k_step(16 * step), true);
    wgmma_commit();
  }

 private:
  __device__ __forceinline__ void load_keys(const uint8_t* shared_k, int thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4;
    constexpr int kPieces = KTile::kCols / 64;  // of 16 bytes, that a thread has of a row
#pragma unroll
    for (int b = 0; b < Traits::kKeyBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int group = 0; group < kPieces; ++group) {
          const int col = KTile::kChunk == 128
                              ? group / 2 * 128 + 32 * (thread % 4) + 16 * (group % 2)
                              : group * 64 + 16 * (thread % 4);
          const uint4 x =
              *reinterpret_cast<const uint4*>(shared_k + KTile::offset(64 * b + row + 8 * h, col));
          const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            r_k_[b][4 * group + i][h] = e4m3_to_float16(uint16_t(words[i]));
            r_k_[b][4 * group + i][2 + h] = e4m3_to_float16(uint16_t(words[i] >> 16));
          }
        }
  }

  __device__ __forceinline__ void load_values(const uint8_t* shared_v, int thread) {
    const int lane = thread % 32, dim = thread / 32 * 16;
    const uint32_t base = uint32_t(__cvta_generic_to_shared(shared_v));
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b)
#pragma unroll
      for (int step = 0; step < kKeySteps; step += 2) {
        uint32_t pairs[4];  // of keys, and of dims: keys 8·i and on
        ldmatrix_x4_transposed(base + VTile::offset(16 * step + lane, 64 * b + dim), pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t by_dim = __byte_perm(pairs[i], 0, 0x3120);
          r_v_[b][step + i / 2][i % 2 * 2] = e4m3_to_float16(uint16_t(by_dim));
          r_v_[b][step + i / 2][i % 2 * 2 + 1] = e4m3_to_float16(uint16_t(by_dim >> 16));
        }
      }
  }

  uint32_t r_k_[Traits::kKeyBlocks][kDimSteps][4], r_v_[Traits::kDimBlocks][kKeySteps][4];
};

}  // namespace flash3::cuda::sm90
