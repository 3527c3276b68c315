// SPDX-License-Identifier: Apache-2.0
// The two products of attention on one warpgroup: 64 query rows, accumulators in registers.
//
// Accumulator fragment (PTX ISA 9.7.15.5.2.2, m64nN): thread t of the warpgroup holds rows
// r0 = 16·(t / 32) + t % 32 / 4 and r0 + 8; element 4j + 2h + e is row r0 + 8h, column 8j + 2·(t %
// 4) + e.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/ptx/compiler.cuh"
#include "cuda/sm90/device/tile/shared_tile.cuh"

namespace flash3::cuda::sm90 {

inline constexpr int kWarpgroupRows = 64;

// Gives a tile's descriptor its address.
__device__ __forceinline__ Descriptor descriptor(Descriptor layout, const void* shared) {
  return layout + int(__cvta_generic_to_shared(shared));
}

// Issues S = Q·Kᵀ, S [64, QTile, KTile::kRows], and commits it as one group.
template <Element T, class QTile, class KTile>
__device__ __forceinline__ void issue_qk(float (&r_s)[KTile::kRows / 2], Descriptor q,
                                         Descriptor k) {
  static_assert(QTile::kCols == KTile::kCols);
  mark_undefined(r_s);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < QTile::kCols; col += QTile::kStep) {
    Wgmma<T, KTile::kRows>::ss(r_s, q + QTile::k_step(col), k + KTile::k_step(col), col != 0);
  }
  wgmma_commit();
}

// Issues O += P·V, P [64, VTile::kRows] packed by pack_probabilities, and commits it as one group.
template <Element T, class VTile>
__device__ __forceinline__ void issue_pv(float (&r_o)[VTile::kCols / 2],
                                         uint32_t (&r_p)[VTile::kRows / 4], Descriptor v) {
  fence_operand(r_o);
  fence_operand(r_p);
  wgmma_fence();
#pragma unroll
  for (int row = 0; row < VTile::kRows; row += 16) {
    Wgmma<T, VTile::kCols>::rs(r_o, &r_p[row / 4], v + VTile::mn_step(row), true);
  }
  wgmma_commit();
}

// Stores the first `columns` columns of row r0 + 8h of a fragment in float32; in_pairs: each two of
// a row lie in 8 aligned bytes.
template <int N>
__device__ __forceinline__ void store_fragment_row(float* row, const float (&r)[N], int h,
                                                   int columns, bool in_pairs, int thread) {
#pragma unroll
  for (int i = 2 * h; i < N; i += 4) {
    const int col = i / 4 * 8 + thread % 4 * 2;
    if (in_pairs && col + 1 < columns) {
      *reinterpret_cast<float2*>(row + col) = make_float2(r[i], r[i + 1]);
    } else {
      if (col < columns) row[col] = r[i];
      if (col + 1 < columns) row[col + 1] = r[i + 1];
    }
  }
}

// The score accumulator is, element for element, the A operand of the next product: only rounding
// is needed.
template <Element T, int N>
__device__ __forceinline__ void pack_probabilities(const float (&r_s)[N], uint32_t (&r_p)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) r_p[i] = pack2<T>(r_s[2 * i], r_s[2 * i + 1]);
}

}  // namespace flash3::cuda::sm90
