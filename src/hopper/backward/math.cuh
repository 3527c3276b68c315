// SPDX-License-Identifier: Apache-2.0
// The consumer: one warpgroup, 64 keys, whose dK and dV stay in its registers, and all queries of a
// tile at once. Scores are computed transposed, keys × queries, so that P and dS come out of the
// tensor cores as they go back in: as the register operand of dV = Pᵀ·dOut and dK = dSᵀ·Q. Only dQ
// needs the keys of all warpgroups: dS goes through shared memory for it, and each computes its
// half. Per query tile i, in the order of issue
//
//   Sᵀ_i = K·Q_iᵀ, dPᵀ_i = V·dOut_iᵀ    asynchronous, as all products
//   wait Sᵀ_i; Pᵀ_i = exp2(Sᵀ_i − lse)
//   wait dPᵀ_i; dSᵀ_i = Pᵀ_i ∘ (dPᵀ_i − delta)
//   dS_i to shared memory
//   dV += Pᵀ_i·dOut_i
//   the warpgroups meet
//   dQ_i = dS_i·K, this warpgroup's half
//   dK += dSᵀ_i·Q_i
//   wait dQ_i; stage it for the thread that adds it to the sums in global memory (add_dq.cuh)
//   wait dK
//
// FlashAttention-2, alg. 2; FlashAttention-3, §3.1.
#pragma once

#include "hopper/backward/add_dq.cuh"
#include "hopper/backward/kernel.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/backward/store.cuh"

namespace flash3::hopper {

// Issues a warpgroup's half of dQ: its queries, or its 64 columns; transposed where the queries are
// no M of a tensor core product. k: columns of all, ds: rows of all.
template <class Traits>
__device__ __forceinline__ void issue_dq(float (&r_dq)[Traits::kOwnQuads * 4], Descriptor k,
                                         Descriptor ds, int warpgroup) {
  using KTile = typename Traits::KTile;
  using DsTile = typename Traits::DsTile;
  constexpr bool kByQueries = Traits::kHeadDim == 64;
  if constexpr (kByQueries) {
    ds = ds + warpgroup * Traits::kTileM / 2 * DsTile::kRowBytes;
  } else {
    static_assert(KTile::kChunks == kConsumerWarpgroups, "a chunk of dQ's columns a warpgroup");
    k = k + warpgroup * KTile::kChunkBytes;
  }
  if constexpr (Traits::kConfig.dq_transposed()) {
    issue_transposed_dq<Traits::kElement, DsTile, KTile>(r_dq, k, ds);
  } else {
    issue_dq_block<Traits::kElement, DsTile, KTile>(r_dq, ds, k);
  }
}

template <class Traits>
__device__ __forceinline__ void accumulate(const BackwardParams& params,
                                           typename Traits::Shared& shared, const KeyTile& work,
                                           int warpgroup) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using QTile = typename Traits::QTile;
  using DoutTile = typename Traits::DoutTile;
  using DsTile = typename Traits::DsTile;
  constexpr Element kElement = Traits::kElement;
  constexpr int kTileM = Traits::kTileM;

  const int thread = thread_in_warpgroup();
  const KeysMask<Traits> mask(shared, warpgroup * kWarpgroupRows, thread);
  const Descriptor k_rows =
      descriptor(KTile::kMajorK, shared.k) + warpgroup * 64 * KTile::kRowBytes;
  const Descriptor v_rows =
      descriptor(VTile::kMajorK, shared.v) + warpgroup * 64 * VTile::kRowBytes;
  const Descriptor k_columns = descriptor(KTile::kMajorMN, shared.k);
  const Descriptor q_rows = descriptor(QTile::kMajorK, shared.q);
  const Descriptor q_columns = descriptor(QTile::kMajorMN, shared.q);
  const Descriptor dout_rows = descriptor(DoutTile::kMajorK, shared.dout);
  const Descriptor dout_columns = descriptor(DoutTile::kMajorMN, shared.dout);
  const Descriptor ds_rows = descriptor(DsTile::kMajorK, shared.ds);

  float r_dk[Traits::kHeadDim / 2] = {}, r_dv[Traits::kHeadDimV / 2] = {};
  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  int m = work.query_tile_begin;
  wait(&shared.k_full, 0, "k_full");
  wait(&shared.v_full, 0, "v_full");
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const auto [stage, phase] = QueryState::at(tile);
    const int ds_stage = DsState::at(tile).stage;
    float r_s[kTileM / 2], r_dp[kTileM / 2];
    wait(&shared.q_barriers.full[stage], phase, "q_full");
    issue_transposed_scores<kElement, KTile, QTile>(r_s, k_rows, q_rows + stage * QTile::kBytes);
    wait(&shared.dout_barriers.full[stage], phase, "dout_full");
    issue_transposed_scores<kElement, VTile, DoutTile>(r_dp, v_rows,
                                                       dout_rows + stage * DoutTile::kBytes);
    wgmma_wait<1>();  // S
    fence_operand(r_s);
    if constexpr (Traits::kCapped) remap_tile(params.softcap, r_s);
    mask.apply(r_s, m * kTileM, thread);
    uint32_t r_p[kTileM / 4], r_ds[kTileM / 4];
    // The LSE as it is needed: there are no registers for all of it.
    const auto lse = [&](int pair) { return load_row_pair(shared.lse[stage], pair, thread); };
    if constexpr (Traits::kCapped) {
      compute_capped_probabilities<kElement>(r_s, r_p, params.softcap, params.scale_log2, lse);
    } else {
      compute_probabilities(r_s, params.scale_log2, lse);
    }
    // Delta likewise, but for half of it, where there are: that is loaded under dP.
    constexpr int kPairs = kTileM / 8, kAhead = Traits::kCapped ? 0 : kPairs / 2;
    float2 r_delta[kAhead + 1];
#pragma unroll
    for (int pair = 0; pair < kAhead; ++pair)
      r_delta[pair] = load_row_pair(shared.delta[stage], pair, thread);
    wgmma_wait<0>();  // dP
    fence_operand(r_dp);
    subtract_delta(r_dp, r_s, [&](int pair) {
      return pair < kAhead ? r_delta[pair] : load_row_pair(shared.delta[stage], pair, thread);
    });
    if constexpr (!Traits::kCapped) pack_probabilities<kElement>(r_s, r_p);
    pack_probabilities<kElement>(r_dp, r_ds);
    // Under a softcap there are no registers for addresses that the compiler would compute ahead.
    const int late_thread = Traits::kCapped ? hide_from_optimizer(thread) : thread,
              late_warpgroup = Traits::kCapped ? hide_from_optimizer(warpgroup) : warpgroup;
    store_ds<DsTile>(shared.ds[ds_stage], r_ds, late_warpgroup, late_thread);
    // dV here: it runs under the fence and the meeting, but would hold the stores up.
    issue_gradient<kElement, DoutTile>(r_dv, r_p, dout_columns + stage * DoutTile::kBytes);
    fence_shared_for_async_proxy();
    sync(BackwardBarrier::kScoreGradient, 0, kConsumerWarpgroups * kWarpgroupThreads);

    float r_dq[Traits::kOwnQuads * 4];
    issue_dq<Traits>(r_dq, k_columns, ds_rows + ds_stage * DsTile::kBytes, warpgroup);
    issue_gradient<kElement, QTile>(r_dk, r_ds, q_columns + stage * QTile::kBytes);
    wgmma_wait<2>();  // dV
    fence_operand(r_dv);
    fence_operand(r_p);
    arrive(&shared.dout_barriers.empty[stage]);
    wgmma_wait<1>();  // dQ
    fence_operand(r_dq);
    stage_dq<Traits>(shared, r_dq, late_warpgroup, tile, late_thread);
    hand_dq_over<Traits>(shared, warpgroup);
    wgmma_wait<0>();  // dK
    fence_operand(r_dk);
    fence_operand(r_ds);
    arrive(&shared.q_barriers.empty[stage]);
    m = work.next(m);
  }

  finish_own_keys<Traits>(params, shared, work, r_dk, r_dv, warpgroup, thread);
}

}  // namespace flash3::hopper
