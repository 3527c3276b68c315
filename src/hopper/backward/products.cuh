// The pieces that both kinds of consumer are made of: products, and what happens to a 64 × 64 tile
// of transposed scores between them.
#pragma once

#include "hopper/backward/kernel.cuh"
#include "hopper/device/band_mask.cuh"
#include "hopper/device/ptx/stmatrix.cuh"

namespace flash3::hopper {

// A warp's arrival that it has read a stage.
__device__ __forceinline__ void release_stage(uint64_t* empty, int thread) {
  if (thread % 32 == 0) arrive(empty);
}

// Issues D = A·Bᵀ, 64 rows of ATile by kStepQueries rows of BTile, the reduction over the columns.
template <Element T, class ATile, class BTile>
__device__ __forceinline__ void issue_transposed_scores(float (&r)[kStepQueries / 2], Descriptor a,
                                                        Descriptor b) {
  static_assert(ATile::kCols == BTile::kCols);
  discard_registers(r);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < ATile::kCols; col += 16) {
    Wgmma<T, kStepQueries>::ss(r, a + ATile::k_step(col), b + BTile::k_step(col), col != 0);
  }
  wgmma_commit();
}

// Issues D += A·B, A [64, kStepQueries] in registers, B kStepQueries rows of BTile.
template <Element T, class BTile>
__device__ __forceinline__ void issue_gradient(float (&r)[BTile::kCols / 2],
                                               uint32_t (&a)[kStepQueries / 4], Descriptor b) {
  pin_registers(r);
  pin_registers(a);
  wgmma_fence();
#pragma unroll
  for (int row = 0; row < kStepQueries; row += 16) {
    Wgmma<T, BTile::kCols>::rs(r, &a[row / 4], b + BTile::mn_step(row), true);
  }
  wgmma_commit();
}

// Issues D += Aᵀ·B, A kStepQueries rows of 64 columns of ATile, B kStepQueries rows of BTile.
template <Element T, class ATile, class BTile>
__device__ __forceinline__ void issue_gradient_shared(float (&r)[BTile::kCols / 2], Descriptor a,
                                                      Descriptor b) {
  pin_registers(r);
  wgmma_fence();
#pragma unroll
  for (int row = 0; row < kStepQueries; row += 16) {
    Wgmma<T, BTile::kCols>::template ss<true, true>(r, a + ATile::mn_step(row),
                                                    b + BTile::mn_step(row), true);
  }
  wgmma_commit();
}

// A step's dSᵀ of this warpgroup, packed, to its 64 columns of the tile of dS.
template <class DsTile>
__device__ __forceinline__ void store_ds(uint8_t* ds, const uint32_t (&r_ds)[kStepQueries / 4],
                                         int first_query, int warpgroup, int thread) {
  const int lane = thread % 32;
  const int query = first_query + lane / 16 * 8 + lane % 8;
  const int key = warpgroup * 64 + thread / 32 * 16 + lane / 8 % 2 * 8;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(ds));
#pragma unroll
  for (int j = 0; j < kStepQueries / 16; ++j) {
    stmatrix_x4_transposed(base + DsTile::offset(16 * j + query, key), r_ds[4 * j], r_ds[4 * j + 1],
                           r_ds[4 * j + 2], r_ds[4 * j + 3]);
  }
}

__device__ __forceinline__ void store_shared(float4* to, const float* x) {
  asm volatile(
      "st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
}

// Issues one 64 × 64 block of dQ = dS·K; ds: its rows, k: its columns.
template <Element T, class DsTile, class KTile>
__device__ __forceinline__ void issue_dq_block(float (&r_dq)[32], Descriptor ds, Descriptor k) {
  discard_registers(r_dq);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < DsTile::kCols; key += 16) {
    Wgmma<T, 64>::template ss<false, true>(r_dq, ds + DsTile::k_step(key), k + KTile::mn_step(key),
                                           key != 0);
  }
  wgmma_commit();
}

// Keeps a number that the compiler could fetch again from the kernel's parameters in its register:
// such a fetch queues behind the products.
__device__ __forceinline__ int keep(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Which steps of a warpgroup's 64 keys need a mask.
template <bool kBand>
struct StepMask {
  int keys;  // from the first of the 64 to the end of all

  __device__ __forceinline__ StepMask(const BackwardParams& params, int first_key)
      : keys(keep(params.seq_k - first_key)) {}

  // Scores of hidden pairs become −∞.
  __device__ __forceinline__ void apply(const BackwardParams& params,
                                        float (&r_s)[kStepQueries / 2], int query,
                                        int thread) const {
    const int row = thread / 32 * 16 + thread % 32 / 4;  // the other: 8 further
    const int behind_first_whole =
        int(uint32_t(query) + uint32_t(keys) - uint32_t(params.first_whole));
    if (kBand && (behind_first_whole < 0 || behind_first_whole > params.whole_steps)) {
      const int key = params.seq_k - keys + row;
      const int keys_of_rows[2] = {key, key + 8};
      mask_scores<true>(r_s, int(params.queries.lo), int(params.queries.hi), keys_of_rows,
                        query + thread % 4 * 2, params.rows.padded_q);
    }
    if (keys < kWarpgroupRows) {
#pragma unroll
      for (int j = 0; j < kStepQueries / 2; ++j) {
        if (row + j / 2 % 2 * 8 >= keys) r_s[j] = -kInfinity;
      }
    }
  }
};

// The lse or delta of the queries of this thread's columns; rows: of the step's queries. Loaded
// where this stands: the compiler would wait until it needs them, behind other accesses.
__device__ __forceinline__ void load_rows(float2 (&r)[kStepQueries / 8], const float* rows,
                                          int thread) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(rows + thread % 4 * 2));
#pragma unroll
  for (int j = 0; j < kStepQueries / 8; ++j) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(r[j].x), "=f"(r[j].y)
                 : "r"(address + 32 * j)
                 : "memory");
  }
}

// Pᵀ = exp2(Sᵀ · scale − lse) in place.
__device__ __forceinline__ void compute_probabilities(float (&r_s)[kStepQueries / 2],
                                                      float scale_log2,
                                                      const float2 (&lse)[kStepQueries / 8]) {
#pragma unroll
  for (int j = 0; j < kStepQueries / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* s = &r_s[4 * j + 2 * h];
      s[0] = exp2_approx(fmaf(s[0], scale_log2, -lse[j].x));
      s[1] = exp2_approx(fmaf(s[1], scale_log2, -lse[j].y));
    }
  }
}

// dSᵀ = Pᵀ ∘ (dPᵀ − delta), in the place of dPᵀ.
__device__ __forceinline__ void subtract_delta(float (&r_dp)[kStepQueries / 2],
                                               const float (&r_p)[kStepQueries / 2],
                                               const float2 (&delta)[kStepQueries / 8]) {
#pragma unroll
  for (int j = 0; j < kStepQueries / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 4 * j + 2 * h;
      r_dp[i] = r_p[i] * (r_dp[i] - delta[j].x);
      r_dp[i + 1] = r_p[i + 1] * (r_dp[i + 1] - delta[j].y);
    }
  }
}

}  // namespace flash3::hopper
