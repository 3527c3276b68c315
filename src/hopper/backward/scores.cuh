// SPDX-License-Identifier: Apache-2.0
// What happens to a warpgroup's tile of transposed scores in registers: the mask, P = exp2(S − lse)
// and dS = P ∘ (dP − delta).
#pragma once

#include "hopper/backward/traits.cuh"
#include "hopper/device/band_mask.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/softcap_remap.cuh"

namespace flash3::hopper {

// Masks a warpgroup's 64 keys in the query tiles that need it.
template <class Traits>
struct KeysMask {
  typename Traits::Shared& shared;
  int first_row;     // of the 64 keys, in the block's tile
  int keys;          // from the first of the 64 to the end of the sequence
  WholeTiles whole;  // band

  // The whole warpgroup calls this.
  __device__ __forceinline__ KeysMask(typename Traits::Shared& s, int row, int thread)
      : shared(s), first_row(row) {
    const KeyTile& work = shared.work;
    const int first_key = work.key + first_row;
    keys = work.sequence.k_length - first_key;
    if constexpr (Traits::kBand) {
      // Each warp writes the rows that it reads.
      const int own = thread / 32 * 16 + thread % 16, key = first_key + own;
      if (thread % 32 < 16)
        shared.seen_by[first_row + own] =
            own < keys ? RowKeys{work.queries.first(key), work.queries.end(key)} : RowKeys{};
      whole = whole_tiles(work, {first_key, first_key + kWarpgroupRows}, Traits::kTileM);
      __syncwarp();
    }
  }

  // Sets the scores of hidden pairs to −∞. query: the tile's first one.
  template <int N>
  __device__ __forceinline__ void apply(float (&r_s)[N], int query, int thread) const {
    const int row = thread / 32 * 16 + thread % 32 / 4;  // the thread's other row is row + 8
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

// The lse or delta of the pair-th two neighbouring queries that this thread has scores of.
__device__ __forceinline__ float2 load_query_pair(const float* queries, int pair, int thread) {
  return load_shared(queries + thread % 4 * 2 + 8 * pair);
}

template <int N>
__device__ __forceinline__ void load_query_pairs(float2 (&r)[N], const float* queries, int thread) {
#pragma unroll
  for (int pair = 0; pair < N; ++pair) r[pair] = load_query_pair(queries, pair, thread);
}

// Pᵀ = exp2(Sᵀ · scale − lse) in place. lse(pair): of the pair-th two neighbouring queries.
template <int N, class Lse>
__device__ __forceinline__ void compute_plain_probabilities(float (&r_s)[N], float scale_log2,
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

// Under a softcap, with remapped scores: rounds Pᵀ = exp2(tanh · scale − lse) into r_p, and
// replaces the scores by Pᵀ · (1 − tanh²), by which dSᵀ = … ∘ (dP − delta) multiplies. So nothing
// of tanh has to wait for dP. Both are 0 for hidden pairs: their tanh is −∞ here, and the slope
// saturates.
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

// Replaces Sᵀ by what dSᵀ is to be multiplied with. Under a softcap r_p has Pᵀ already; otherwise
// that factor is Pᵀ itself, and round_probabilities rounds it into r_p.
template <class Traits, int N, class Lse>
__device__ __forceinline__ void compute_probabilities(const BackwardParams& params, float (&r_s)[N],
                                                      uint32_t (&r_p)[N / 2], const Lse& lse) {
  if constexpr (Traits::kCapped) {
    compute_capped_probabilities<Traits::kElement>(r_s, r_p, params.softcap, params.scale_log2,
                                                   lse);
  } else {
    compute_plain_probabilities(r_s, params.scale_log2, lse);
  }
}

template <class Traits, int N>
__device__ __forceinline__ void round_probabilities(const float (&r_s)[N], uint32_t (&r_p)[N / 2]) {
  if constexpr (!Traits::kCapped) pack_probabilities<Traits::kElement>(r_s, r_p);
}

// dSᵀ = Pᵀ ∘ (dPᵀ − delta), in the place of dPᵀ. delta(pair): as lse(pair).
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
