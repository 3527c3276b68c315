// SPDX-License-Identifier: Apache-2.0
// The products of a query tile on the tensor cores. Each function issues one and commits it as one
// group.
#pragma once

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// Sᵀ = K·Qᵀ or dPᵀ = V·dOutᵀ: 64 rows of ATile by as many rows of BTile as the result has columns.
template <Element T, class ATile, class BTile, int N>
__device__ __forceinline__ void issue_transposed_scores(float (&r)[N], Descriptor a, Descriptor b) {
  static_assert(ATile::kCols == BTile::kCols);
  mark_undefined(r);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < ATile::kCols; col += 16) {
    Wgmma<T, 2 * N>::ss(r, a + ATile::k_step(col), b + BTile::k_step(col), col != 0);
  }
  wgmma_commit();
}

// dV += Pᵀ·dOut or dK += dSᵀ·Q: A [64, 4 · N] is in registers, B is 4 · N rows of BTile. 256
// columns take two products: their kernels have 512 threads, which are compiled for 128 registers,
// and the sums of one product would be as many.
template <Element T, class BTile, int N>
__device__ __forceinline__ void issue_gradient(float (&r)[BTile::kCols / 2], uint32_t (&a)[N],
                                               Descriptor b) {
  constexpr int kCols = BTile::kCols == 256 ? 128 : BTile::kCols;
  using Sums = float(&)[kCols / 2];
  fence_operand(r);
  fence_operand(a);
  wgmma_fence();
#pragma unroll
  for (int row = 0; row < 4 * N; row += 16) {
#pragma unroll
    for (int col = 0; col < BTile::kCols; col += kCols) {
      Wgmma<T, kCols>::rs(reinterpret_cast<Sums>(r[col / 2]), &a[row / 4],
                          b + BTile::mn_step(row) + col / BTile::kChunk * BTile::kChunkBytes, true);
    }
  }
  wgmma_commit();
}

// One block of dQ = dS·K, 64 queries × 64 columns. ds: its rows of dS; k: its columns of K.
template <Element T, class DsTile, class KTile>
__device__ __forceinline__ void issue_dq_block(float (&r_dq)[32], Descriptor ds, Descriptor k) {
  mark_undefined(r_dq);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < DsTile::kCols; key += 16) {
    Wgmma<T, 64>::template ss<false, true>(r_dq, ds + DsTile::k_step(key), k + KTile::mn_step(key),
                                           key != 0);
  }
  wgmma_commit();
}

// 64 columns of dQᵀ = Kᵀ·dSᵀ, for as many queries as the result has columns.
template <Element T, class DsTile, class KTile, int N>
__device__ __forceinline__ void issue_transposed_dq(float (&r_dq)[N], Descriptor k, Descriptor ds) {
  mark_undefined(r_dq);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < DsTile::kCols; key += 16) {
    Wgmma<T, 2 * N>::template ss<true, false>(r_dq, k + KTile::mn_step(key),
                                              ds + DsTile::k_step(key), key != 0);
  }
  wgmma_commit();
}

// Stores dSᵀ of a warpgroup's keys, packed, to its 64 columns of the tile of dS.
template <class DsTile, int N>
__device__ __forceinline__ void store_ds(uint8_t* ds, const uint32_t (&r_ds)[N], int warpgroup,
                                         int thread) {
  const int lane = thread % 32;
  const int query = lane / 16 * 8 + lane % 8;
  const int key = warpgroup * 64 + thread / 32 * 16 + lane / 8 % 2 * 8;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(ds));
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    stmatrix_x4_transposed(base + DsTile::offset(16 * j + query, key), r_ds[4 * j], r_ds[4 * j + 1],
                           r_ds[4 * j + 2], r_ds[4 * j + 3]);
  }
}

}  // namespace flash3::cuda::sm90
