// SPDX-License-Identifier: Apache-2.0
// The consumers of wide tiles, whose dK and dV of 64 keys exceed the registers of one warpgroup:
// the first holds dV, the second dK, of the same 64 keys. The first hands P to the second through
// shared memory, in float32. Per query tile i, in the order of issue
//
//   first warpgroup                        second warpgroup
//   Pᵀ_i = exp2(Sᵀ_i − lse)                wait dPᵀ_i
//   Pᵀ_i to shared memory ───────────────► dSᵀ_i = Pᵀ_i ∘ (dPᵀ_i − delta)
//   dV += Pᵀ_i·dOut_i                      dS_i to shared memory, for dQ (accumulate_dq.cuh)
//   Sᵀ_{i+1} = K·Q_{i+1}ᵀ                  dPᵀ_{i+1} = V·dOut_{i+1}ᵀ
//                                          dK += dSᵀ_i·Q_i
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/accumulate_dq.cuh"
#include "cuda/sm90/backward/produce_wide.cuh"
#include "cuda/sm90/backward/scores.cuh"
#include "cuda/sm90/backward/store.cuh"

namespace flash3::cuda::sm90 {

// As issue_add_ab, but 256 columns take two products: their kernels have 512 threads, which are
// compiled for 128 registers, and the sums of one product would be as many.
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

template <int N>
__device__ __forceinline__ void load_query_pairs(float2 (&r)[N], const float* queries, int thread) {
#pragma unroll
  for (int pair = 0; pair < N; ++pair) r[pair] = load_query_pair(queries, pair, thread);
}

// Hands P of the tile-th query tile to the second warpgroup.
template <class Traits>
__device__ __forceinline__ void store_p(typename Traits::Shared& shared, const float (&r_p)[32],
                                        int tile, int thread) {
  wait(&shared.p_barriers.empty[0], SingleState::at(tile).phase ^ 1, "p_empty");
#pragma unroll
  for (int j = 0; j < 8; ++j) store_shared(&shared.fragments[j][thread], &r_p[4 * j]);
  arrive(&shared.p_barriers.full[0]);
}

// Takes it and makes dSᵀ of it, in the place of dPᵀ. In halves: there are no registers for all of P
// beside dK and dP.
template <class Traits>
__device__ __forceinline__ void make_ds(const BackwardParams& params,
                                        typename Traits::Shared& shared, float (&r_dp)[32],
                                        int tile, int thread) {
  const float* const delta = shared.delta[QueryState::at(tile).stage];  // there since dOut is
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    float2 r_delta[4];
    load_query_pairs(r_delta, delta + 8 * first, thread);
    if (first == 0) wait(&shared.p_barriers.full[0], SingleState::at(tile).phase, "p_full");
    float4 r_p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) r_p[j] = shared.fragments[first + j][thread];
    if (first == 4) arrive(&shared.p_barriers.empty[0]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* const x = &r_dp[4 * (first + j)];
      if constexpr (Traits::kBiased) {
        Probabilities<Traits>::subtract(params, x, r_p[j], r_delta[j]);
        continue;
      }
      x[0] = r_p[j].x * (x[0] - r_delta[j].x), x[1] = r_p[j].y * (x[1] - r_delta[j].y);
      x[2] = r_p[j].z * (x[2] - r_delta[j].x), x[3] = r_p[j].w * (x[3] - r_delta[j].y);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void accumulate_dv(const BackwardParams& params,
                                              typename Traits::Shared& shared, const KeyTile& work,
                                              int thread) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using QTile = typename Traits::QTile;
  using DoutTile = typename Traits::DoutTile;
  constexpr Element kElement = Traits::kElement;

  KeysMask<Traits> mask(params, shared, work, 0, thread);
  const Descriptor k_rows = descriptor(KTile::kMajorK, shared.k[0]);
  const Descriptor q_rows = descriptor(QTile::kMajorK, shared.q);
  const Descriptor dout_columns = descriptor(DoutTile::kMajorMN, shared.dout);

  float r_dv[Traits::kHeadDimV / 2] = {};
  float r_s[Traits::kTileM / 2];
  uint32_t r_p[Traits::kTileM / 4];
  float2 r_lse[Traits::kTileM / 8];  // loaded while S is under way
  const auto wait_for_q = [&](QueryState at) {
    wait(&shared.q_barriers.full[at.stage], at.phase, "q_full");
  };
  const auto issue_s = [&](QueryState at) {
    issue_abt<kElement, KTile, QTile>(r_s, k_rows, q_rows + at.stage * QTile::kBytes);
    if constexpr (!Traits::kBiased) load_query_pairs(r_lse, shared.lse[at.stage], thread);
  };

  const int tiles = query_steps<Traits>(params, work);
  int m = work.query_tile_begin;
  wait(&shared.k_barriers.full[0], 0, "k_full");
  if (tiles > 0) {
    wait_for_q({});
    issue_s({});
    wgmma_wait<0>();
    fence_operand(r_s);
  }
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const auto [stage, phase] = QueryState::at(tile);
    const QueryState next = QueryState::at(tile + 1);
    if constexpr (Traits::kLists) m = mask.query_tile(stage);
    const auto view = mask.template view<Traits::kTileM / 2>(m * Traits::kTileM, thread);
    const Probabilities<Traits> probabilities(
        params, work, Traits::kBiased ? mask.head(params, work, tile) : 0, view);
    probabilities.begin(view, r_s, r_p);
    mask.apply(r_s, m * Traits::kTileM, thread);
    probabilities.compute(view, r_s, r_p, [&](int pair) {
      return Traits::kBiased ? load_query_pair(shared.lse[stage], pair, thread) : r_lse[pair];
    });
    store_p<Traits>(shared, r_s, tile, thread);
    arrive(&shared.q_barriers.empty[stage]);
    probabilities.round(r_s, r_p);

    wait(&shared.dout_barriers.full[stage], phase, "dout_full");
    issue_gradient<kElement, DoutTile>(r_dv, r_p, dout_columns + stage * DoutTile::kBytes);
    // After the last tile this computes scores of whatever the stage holds: a branch around the
    // product would make ptxas give the asynchronous pipeline up (C7512).
    if (tile + 1 < tiles) wait_for_q(next);
    issue_s(next);
    wgmma_wait<1>();  // dV
    fence_operand(r_dv);
    fence_operand(r_p);
    arrive(&shared.dout_barriers.empty[stage]);
    wgmma_wait<0>();
    fence_operand(r_s);
    if constexpr (!Traits::kLists) m = work.next(m);
  }

  // dV takes the place of V: the other warpgroup must have read it, as this one K.
  arrive(&shared.own_keys_read);
  wait(&shared.own_keys_read, 0, "own_keys_read");
  if (params.float32_gradients) return store_float32(dv_out(params), work, work.key, r_dv, thread);
  const StagedGradient<VTile> staged{shared.v, 0};
  finish_gradient<kElement, true>(dv_out(params), work, staged, r_dv, 0, thread);
}

template <class Traits>
__device__ __forceinline__ void accumulate_dk(const BackwardParams& params,
                                              typename Traits::Shared& shared, const KeyTile& work,
                                              int thread) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using QTile = typename Traits::QTile;
  using DoutTile = typename Traits::DoutTile;
  constexpr Element kElement = Traits::kElement;

  const Descriptor v_rows = descriptor(VTile::kMajorK, shared.v);
  const Descriptor q_columns = descriptor(QTile::kMajorMN, shared.q);
  const Descriptor dout_rows = descriptor(DoutTile::kMajorK, shared.dout);

  float r_dk[Traits::kHeadDim / 2] = {};
  float r_dp[Traits::kTileM / 2];
  uint32_t r_ds[Traits::kTileM / 4];
  const auto wait_for_dout = [&](QueryState at) {
    wait(&shared.dout_barriers.full[at.stage], at.phase, "dout_full");
  };
  const auto issue_dp = [&](QueryState at) {
    issue_abt<kElement, VTile, DoutTile>(r_dp, v_rows, dout_rows + at.stage * DoutTile::kBytes);
  };

  const int tiles = query_steps<Traits>(params, work);
  wait(&shared.v_full, 0, "v_full");
  wait(&shared.k_barriers.full[0], 0, "k_full");
  if (tiles > 0) {
    wait_for_dout({});
    issue_dp({});
    wgmma_wait<0>();
    fence_operand(r_dp);
  }
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const auto [stage, phase] = QueryState::at(tile);
    const DsState ds = DsState::at(tile);
    make_ds<Traits>(params, shared, r_dp, tile, thread);
    arrive(&shared.dout_barriers.empty[stage]);
    pack_probabilities<kElement>(r_dp, r_ds);
    // Before the next dP: dQ and dK wait for it.
    wait(&shared.ds_barriers.empty[ds.stage], ds.phase ^ 1, "ds_empty");
    store_ds<typename Traits::DsTile>(shared.ds[ds.stage], r_ds, 0, thread);
    fence_shared_for_async_proxy();
    arrive(&shared.ds_barriers.full[ds.stage]);
    const QueryState next = QueryState::at(tile + 1);
    if (tile + 1 < tiles) wait_for_dout(next);
    issue_dp(next);  // after the last tile as S in accumulate_dv
    wait(&shared.q_barriers.full[stage], phase, "q_full");
    issue_gradient<kElement, QTile>(r_dk, r_ds, q_columns + stage * QTile::kBytes);
    wgmma_wait<0>();
    fence_operand(r_dp);
    fence_operand(r_dk);
    fence_operand(r_ds);
    arrive(&shared.q_barriers.empty[stage]);
  }

  // dK takes the place of K: the warpgroups of dQ and of dV must have read it.
  if (tiles > 0) {
    const DsState last = DsState::at(tiles - 1);
    wait(&shared.ds_barriers.empty[last.stage], last.phase, "ds_empty");
  }
  arrive(&shared.own_keys_read);
  wait(&shared.own_keys_read, 0, "own_keys_read");
#pragma unroll
  for (float& x : r_dk) x *= params.softmax_scale;
  if (params.float32_gradients) return store_float32(dk_out(params), work, work.key, r_dk, thread);
  const StagedGradient<KTile> staged{shared.k[0], 0};
  finish_gradient<kElement, true>(dk_out(params), work, staged, r_dk, 1, thread);
}

template <class Traits>
struct Roles<Traits, true> {
  using Shared = typename Traits::Shared;

  static __device__ __forceinline__ void produce(const BackwardParams& params, Shared& shared,
                                                 const KeyTile& work) {
    produce_wide<Traits>(params, shared, work);
  }
  static __device__ __forceinline__ void accumulate_dq(const BackwardParams& params, Shared& shared,
                                                       const KeyTile& work) {
    sm90::accumulate_dq<Traits>(params, shared, work);
  }
  static __device__ __forceinline__ void consume(const BackwardParams& params, Shared& shared,
                                                 const KeyTile& work, int warpgroup) {
    const int thread = thread_in_warpgroup();
    if (warpgroup == 0) {
      accumulate_dv<Traits>(params, shared, work, thread);
    } else {
      accumulate_dk<Traits>(params, shared, work, thread);
    }
  }
};

}  // namespace flash3::cuda::sm90
