// SPDX-License-Identifier: Apache-2.0
// The pieces that both kinds of consumer are made of: products, and what happens to a tile of
// transposed scores between them.
#pragma once

#include "hopper/backward/kernel.cuh"
#include "hopper/device/band_mask.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/ptx/stmatrix.cuh"
#include "hopper/device/score.cuh"

namespace flash3::hopper {

// Issues D = A·Bᵀ, 64 rows of ATile by as many rows of BTile as D has columns, the reduction over
// the columns.
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

// Issues D += A·B, A [64, 4 · N] in registers, B 4 · N rows of BTile.
template <Element T, class BTile, int N>
__device__ __forceinline__ void issue_gradient(float (&r)[BTile::kCols / 2], uint32_t (&a)[N],
                                               Descriptor b) {
  fence_operand(r);
  fence_operand(a);
  wgmma_fence();
#pragma unroll
  for (int row = 0; row < 4 * N; row += 16) {
    Wgmma<T, BTile::kCols>::rs(r, &a[row / 4], b + BTile::mn_step(row), true);
  }
  wgmma_commit();
}

// dSᵀ of this warpgroup's keys, packed, to its 64 columns of the tile of dS.
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

// Issues one 64 × 64 block of dQ = dS·K; ds: its rows, k: its columns.
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

// Issues 64 columns of dQᵀ = Kᵀ·dSᵀ, of as many queries as D has columns.
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

// Masks the query tiles that need it for a warpgroup's 64 keys.
template <class Traits>
struct KeysMask {
  typename Traits::Shared& shared;
  int first_row;     // of the block's keys
  int keys;          // from the first of the 64 to the end of all
  WholeTiles whole;  // band

  // By the whole warpgroup.
  __device__ __forceinline__ KeysMask(typename Traits::Shared& shared, int first_row, int thread)
      : shared(shared), first_row(first_row) {
    const KeyTile& work = shared.work;
    const int first_key = work.key + first_row;
    keys = work.sequence.k_length - first_key;
    if constexpr (Traits::kBand) {
      // Each warp's own rows.
      const int row = thread / 32 * 16 + thread % 16, key = first_key + row;
      if (thread % 32 < 16)
        shared.seen_by[first_row + row] =
            row < keys ? RowKeys{work.queries.first(key), work.queries.end(key)} : RowKeys{};
      whole = whole_tiles(work, {first_key, first_key + kWarpgroupRows}, Traits::kTileM);
      __syncwarp();
    }
  }

  // Scores of hidden pairs become −∞.
  template <int N>
  __device__ __forceinline__ void apply(float (&r_s)[N], int query, int thread) const {
    const int row = thread / 32 * 16 + thread % 32 / 4;  // the other: 8 further
    if constexpr (Traits::kBand) {
      if (whole.hold(query)) return;
      const RowKeys* seen_by = shared.seen_by + first_row + row;
      mask_scores_by_bits(r_s, seen_by[0], seen_by[8], query + thread % 4 * 2);
    } else {
      if (keys >= kWarpgroupRows) return;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (row + j / 2 % 2 * 8 >= keys) r_s[j] = -kInfinity;
      }
    }
  }
};

// The lse or delta of two neighbouring queries of this thread's columns.
__device__ __forceinline__ float2 load_row_pair(const float* rows, int pair, int thread) {
  return load_shared(rows + thread % 4 * 2 + 8 * pair);
}

// Those of all of this thread's columns; rows: of the step's queries.
template <int N>
__device__ __forceinline__ void load_rows(float2 (&r)[N], const float* rows, int thread) {
#pragma unroll
  for (int pair = 0; pair < N; ++pair) r[pair] = load_row_pair(rows, pair, thread);
}

// Pᵀ = exp2(Sᵀ · scale − lse) in place; lse(pair): of the pair-th two neighbouring columns.
template <int N, class Lse>
__device__ __forceinline__ void compute_probabilities(float (&r_s)[N], float scale_log2,
                                                      const Lse& lse) {
#pragma unroll
  for (int pair = 0; pair < N / 4; ++pair) {
    const float2 x = lse(pair);
#pragma unroll
    for (int i = 4 * pair; i < 4 * pair + 4; i += 2) {
      r_s[i] = exp2_approx(fmaf(r_s[i], scale_log2, -x.x));
      r_s[i + 1] = exp2_approx(fmaf(r_s[i + 1], scale_log2, -x.y));
    }
  }
}

// Under a softcap, of remapped scores: Pᵀ = exp2(tanh · scale − lse), rounded into r_p, and in the
// place of the scores Pᵀ · (1 − tanh²), what dSᵀ has instead of Pᵀ. So nothing of tanh has to wait
// for dP. Hidden pairs, whose tanh is −∞ here, have 0 in both: the slope saturates.
template <Element T, int N, class Lse>
__device__ __forceinline__ void compute_capped_probabilities(float (&r_s)[N],
                                                             uint32_t (&r_p)[N / 2],
                                                             const Softcap& cap, float scale_log2,
                                                             const Lse& lse) {
#pragma unroll
  for (int pair = 0; pair < N / 4; ++pair) {
    const float2 x = lse(pair);
#pragma unroll
    for (int i = 4 * pair; i < 4 * pair + 4; i += 2) {
      const float tanh[2] = {r_s[i] * cap.factor(r_s[i]), r_s[i + 1] * cap.factor(r_s[i + 1])};
      const float p[2] = {exp2_approx(fmaf(tanh[0], scale_log2, -x.x)),
                          exp2_approx(fmaf(tanh[1], scale_log2, -x.y))};
      r_p[i / 2] = pack2<T>(p[0], p[1]);
#pragma unroll
      for (int e = 0; e < 2; ++e) r_s[i + e] = p[e] * __saturatef(fmaf(-tanh[e], tanh[e], 1.f));
    }
  }
}

// dSᵀ = Pᵀ ∘ (dPᵀ − delta), in the place of dPᵀ; delta(pair): likewise.
template <int N, class Delta>
__device__ __forceinline__ void subtract_delta(float (&r_dp)[N], const float (&r_p)[N],
                                               const Delta& delta) {
#pragma unroll
  for (int pair = 0; pair < N / 4; ++pair) {
    const float2 x = delta(pair);
#pragma unroll
    for (int i = 4 * pair; i < 4 * pair + 4; i += 2) {
      r_dp[i] = r_p[i] * (r_dp[i] - x.x);
      r_dp[i + 1] = r_p[i + 1] * (r_dp[i + 1] - x.y);
    }
  }
}

}  // namespace flash3::hopper
