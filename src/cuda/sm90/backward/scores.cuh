// SPDX-License-Identifier: Apache-2.0
// What happens to a warpgroup's tile of transposed scores in registers: the mask, P = exp2(S − lse)
// and dS = P ∘ (dP − delta); and what dS makes of K, dQ.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/mask.cuh"
#include "cuda/device/score/mod.cuh"
#include "cuda/device/score/transposed_views.hpp"
#include "cuda/sm90/backward/walk.cuh"

namespace flash3::cuda::sm90 {

// As RangeMask (device/score/mask.cuh), by bits: one instruction makes seven predicates of them,
// where two comparisons a score take longer.
template <class Rows>
struct RangeMaskByBits {
  const Rows& rows;

  template <int N>
  __device__ __forceinline__ void apply(const QueriesByKeys<N>& view, float (&r_s)[N]) const {
    using View = QueriesByKeys<N>;
    constexpr int kSlices = (N + 61) / 62, kSlice = View::kKeys / kSlices;  // 31 bits at most
    static_assert(kSlice * kSlices == View::kKeys && kSlice % 2 == 0);
#pragma unroll
    for (int r = 0; r < View::kRows; ++r) {
      const RowKeys& seen = rows(r);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int first = view.key(slice * kSlice);
        const uint32_t visible =
            keys_before<kSlice>(seen.end - first) & ~keys_before<kSlice>(seen.first - first);
#pragma unroll
        for (int i = 0; i < kSlice; ++i) {
          float& x = View::at(r_s, r, slice * kSlice + i);
          x = visible & 1u << i ? x : -kInfinity;
        }
      }
    }
  }
};

// Masks a warpgroup's 64 keys in the query tiles that need it. lists.cuh has that of kernels that
// walk lists.
template <class Traits, bool kLists = Traits::kLists>
struct KeysMask;
template <class Traits>
struct KeysMask<Traits, false> {
  typename Traits::Shared& shared;
  int first_row;     // of the 64 keys, in the block's tile
  int keys;          // from the first of the 64 to the end of the sequence
  WholeTiles whole;  // band

  // The whole warpgroup calls this.
  __device__ __forceinline__ KeysMask(const BackwardParams&, typename Traits::Shared& s,
                                      const KeyTile& work, int row, int thread)
      : shared(s), first_row(row) {
    const int first_key = work.key + first_row;
    keys = work.sequence.k_length - first_key;
    if constexpr (Traits::kBand) {
      // Each warp writes the rows that it reads.
      if constexpr (Traits::kPersistent) __syncwarp();  // all its threads have read the last ones
      const int own = thread / 32 * 16 + thread % 16, key = first_key + own;
      if (thread % 32 < 16)
        shared.seen_by[first_row + own] =
            own < keys ? RowKeys{work.queries.first(key), work.queries.end(key)} : RowKeys{};
      whole = whole_tiles(work, {first_key, first_key + kWarpgroupRows}, Traits::kTileM);
      __syncwarp();
    }
  }

  // Of a tile's scores; query: the tile's first one.
  template <int N>
  __device__ __forceinline__ KeysByQueries<N> view(int query, int thread) const {
    return {query + thread % 4 * 2, first_row + thread / 32 * 16 + thread % 32 / 4};
  }

  // Sets the scores of hidden pairs to −∞. query: the tile's first one.
  template <int N>
  __device__ __forceinline__ void apply(float (&r_s)[N], int query, int thread) const {
    using View = QueriesByKeys<N>;  // of the transposed mask, whose rows are keys
    const int row = thread / 32 * 16 + thread % 32 / 4;
    if constexpr (Traits::kBand) {
      if (whole.hold(query)) return;
      const RowKeys* seen_by = shared.seen_by + first_row + row;
      const auto seen = [&](int r) -> const RowKeys& { return seen_by[8 * r]; };
      RangeMaskByBits<decltype(seen)>{seen}.apply(View{row, query + thread % 4 * 2}, r_s);
    } else {
      if (keys >= kWarpgroupRows) return;
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (row + View::row_offset(View::row_of(j)) >= keys) r_s[j] = -kInfinity;
    }
  }

  // The query head of the i-th query tile of the block's walk.
  __device__ __forceinline__ int head(const BackwardParams& params, const KeyTile& work,
                                      int i) const {
    return QueryPlace(params, work, i).head;
  }

  // The warpgroups meet once both have stored their dS.
  template <class Walked>
  __device__ __forceinline__ void meet(Walked&, int) const {
    sync(BackwardBarrier::kDsStored, 0, kConsumerThreads);
  }
};

// The lse or delta of the pair-th two neighbouring queries that this thread has scores of.
__device__ __forceinline__ float2 load_query_pair(const float* queries, int pair, int thread) {
  return load_shared(queries + thread % 4 * 2 + 8 * pair);
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

// What becomes of a tile's scores, plain or capped ones.
template <class Traits>
struct PlainProbabilities {
  using Mod = ModOf<Traits::kConfig.score>;
  const BackwardParams& params;

  // Of a query tile of a head; view: of its scores.
  template <class View>
  __device__ __forceinline__ PlainProbabilities(const BackwardParams& p, const KeyTile&, int,
                                                const View&)
      : params(p) {}

  // Of raw scores, before the mask.
  template <int N>
  __device__ __forceinline__ void begin(const KeysByQueries<N>&, float (&r_s)[N],
                                        uint32_t (&)[N / 2]) const {
    if constexpr (Mod::kRemaps) remap_tile(Mod::of(params), r_s);
  }

  // Replaces scores by what dSᵀ is to be multiplied with: Pᵀ = exp2(Sᵀ · scale − lse), or, under a
  // modification with a slope, Pᵀ times that. So nothing of tanh has to wait for dP. Pᵀ is rounded
  // into r_p then; else round() does that. Both are 0 for hidden pairs. view: of the scores;
  // lse(pair): of the pair-th two neighbouring queries.
  template <int N, class Lse>
  __device__ __forceinline__ void compute(const KeysByQueries<N>& view, float (&r_s)[N],
                                          uint32_t (&r_p)[N / 2], const Lse& lse) const {
    using View = KeysByQueries<N>;
    const Mod mod = Mod::of(params);
    const float scale_log2 = params.scale_log2;
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = lse(pair);
#pragma unroll
      for (int i = 4 * pair; i < 4 * pair + 4; i += 2) {
        const ScorePlace<View> at[2] = {{view, View::row_of(i), View::key_of(i)},
                                        {view, View::row_of(i + 1), View::key_of(i + 1)}};
        if constexpr (!Mod::kSlope) {
          r_s[i] = exp2_approx(mod.above(r_s[i], x.x, at[0]));
          r_s[i + 1] = exp2_approx(mod.above(r_s[i + 1], x.y, at[1]));
        } else {
          const float value[2] = {mod.value(r_s[i], at[0]), mod.value(r_s[i + 1], at[1])};
          const float p[2] = {exp2_approx(fmaf(value[0], scale_log2, -x.x)),
                              exp2_approx(fmaf(value[1], scale_log2, -x.y))};
          r_p[i / 2] = pack2<Traits::kElement>(p[0], p[1]);
#pragma unroll
          for (int e = 0; e < 2; ++e) r_s[i + e] = p[e] * Mod::slope(value[e]);
        }
      }
    }
  }

  template <int N, class Delta>
  static __device__ __forceinline__ void subtract(float (&r_dp)[N], const float (&r_p)[N],
                                                  const Delta& delta) {
    subtract_delta(r_dp, r_p, delta);
  }

  // Pᵀ as operand, if compute() has not made it yet.
  template <int N>
  static __device__ __forceinline__ void round(const float (&r_s)[N], uint32_t (&r_p)[N / 2]) {
    if constexpr (!Mod::kSlope) pack_probabilities<Traits::kElement>(r_s, r_p);
  }
};

// What comes in tiles of a bias: tile_bias.cuh.
template <class Traits>
struct PairTiles;

// tile_bias.cuh has the others.
template <class Traits, BiasTerms kTerms = Traits::kConfig.terms>
struct Probabilities;
template <class Traits>
struct Probabilities<Traits, BiasTerms::kNone> : PlainProbabilities<Traits> {
  using PlainProbabilities<Traits>::PlainProbabilities;
};

// ---- dQ = dS·K: each function issues one product and commits it as one group ----

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
