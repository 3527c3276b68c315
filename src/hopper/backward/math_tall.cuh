// The consumer of tall tiles: one warpgroup, 64 keys, whose dK and dV stay in its registers, and
// all queries of a tile in one step, so that a wider product reads less of shared memory: 80 at d
// 128. That leaves no registers for scores ahead of time. dQ is computed transposed, each warpgroup
// half of its columns: 80 queries are no M of a tensor core product, but an N. Per query tile i, in
// the order of issue
//
//   Sᵀ_i = K·Q_iᵀ, dPᵀ_i = V·dOut_iᵀ    asynchronous, as all products
//   wait Sᵀ_i; Pᵀ_i = exp2(Sᵀ_i − lse)
//   wait dPᵀ_i; dSᵀ_i = Pᵀ_i ∘ (dPᵀ_i − delta)
//   dV += Pᵀ_i·dOut_i
//   dS_i to shared memory; the warpgroups meet
//   dQ_iᵀ = Kᵀ·dSᵀ_i, this warpgroup's columns of dQ
//   dK += dSᵀ_i·Q_i
//   wait dQ_i; stage it for the thread that adds it to the sums in global memory (add_dq.cuh)
//   wait dK
#pragma once

#include "hopper/backward/add_dq.cuh"
#include "hopper/backward/kernel.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/backward/store.cuh"

namespace flash3::hopper {

template <class Traits>
__device__ __forceinline__ void accumulate_tall(const BackwardParams& params,
                                                typename Traits::Shared& shared,
                                                const KeyTile& work, int warpgroup) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using QTile = typename Traits::QTile;
  using DoutTile = typename Traits::DoutTile;
  using DsTile = typename Traits::DsTile;
  constexpr Element kElement = Traits::kElement;
  constexpr int kTileM = Traits::kTileM;
  static_assert(Traits::kQStages == 2 && Traits::kDoutStages == 2);
  static_assert(KTile::kChunks == kConsumerWarpgroups, "a chunk of dQ's columns a warpgroup");

  const int thread = thread_in_warpgroup();
  const StepMask<Traits> mask(shared, warpgroup * kWarpgroupRows, thread);
  const Descriptor k_rows =
      descriptor(KTile::kMajorK, shared.k) + warpgroup * 64 * KTile::kRowBytes;
  const Descriptor v_rows =
      descriptor(VTile::kMajorK, shared.v) + warpgroup * 64 * VTile::kRowBytes;
  const Descriptor k_columns =
      descriptor(KTile::kMajorMN, shared.k) + warpgroup * KTile::kChunkBytes;
  const Descriptor q_rows = descriptor(QTile::kMajorK, shared.q);
  const Descriptor q_columns = descriptor(QTile::kMajorMN, shared.q);
  const Descriptor dout_rows = descriptor(DoutTile::kMajorK, shared.dout);
  const Descriptor dout_columns = descriptor(DoutTile::kMajorMN, shared.dout);
  const Descriptor ds_rows = descriptor(DsTile::kMajorK, shared.ds);

  float r_dk[Traits::kHeadDim / 2] = {}, r_dv[Traits::kHeadDimV / 2] = {};
  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  int m = work.query_tile_begin;
  wait(&shared.k_full, 0, BarrierName::kKFull);
  wait(&shared.v_full, 0, BarrierName::kVFull);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2, phase = tile / 2 % 2;
    float r_s[kTileM / 2], r_dp[kTileM / 2];
    wait(&shared.q_barriers.full[stage], phase, BarrierName::kQFull);
    issue_transposed_scores<kElement, KTile, QTile>(r_s, k_rows, q_rows + stage * QTile::kBytes);
    wait(&shared.dout_barriers.full[stage], phase, BarrierName::kDoutFull);
    issue_transposed_scores<kElement, VTile, DoutTile>(r_dp, v_rows,
                                                       dout_rows + stage * DoutTile::kBytes);
    wgmma_wait<1>();  // S
    pin_registers(r_s);
    if constexpr (Traits::kCapped) confine(params.softcap, r_s);
    mask.apply(r_s, m * kTileM, thread);
    uint32_t r_p[kTileM / 4], r_ds[kTileM / 4];
    // The LSE, and below delta, as they are needed: there are no registers for all of them.
    const auto lse = [&](int pair) { return load_row_pair(shared.lse[stage], pair, thread); };
    if constexpr (Traits::kCapped) {
      compute_capped_probabilities<kElement>(r_s, r_p, params.softcap, params.scale_log2, lse);
    } else {
      compute_probabilities(r_s, params.scale_log2, lse);
    }
    wgmma_wait<0>();  // dP
    pin_registers(r_dp);
    subtract_delta(r_dp, r_s,
                   [&](int pair) { return load_row_pair(shared.delta[stage], pair, thread); });
    if constexpr (!Traits::kCapped) pack_probabilities<kElement>(r_s, r_p);
    pack_probabilities<kElement>(r_dp, r_ds);
    issue_gradient<kElement, DoutTile>(r_dv, r_p, dout_columns + stage * DoutTile::kBytes);
    // Under a softcap there are no registers for addresses that the compiler would compute ahead.
    const int late_thread = Traits::kCapped ? opaque(thread) : thread,
              late_warpgroup = Traits::kCapped ? opaque(warpgroup) : warpgroup;
    store_ds<DsTile>(shared.ds[stage], r_ds, 0, late_warpgroup, late_thread);
    fence_shared_for_async_proxy();
    sync(NamedBarrier::kScoreGradient, 0, kConsumerWarpgroups * kWarpgroupThreads);

    float r_dq[kTileM / 2];
    issue_transposed_dq<kElement, DsTile, KTile>(r_dq, k_columns, ds_rows + stage * DsTile::kBytes);
    issue_gradient<kElement, QTile>(r_dk, r_ds, q_columns + stage * QTile::kBytes);
    wgmma_wait<2>();  // dV
    pin_registers(r_dv);
    pin_registers(r_p);
    arrive(&shared.dout_barriers.empty[stage]);
    wgmma_wait<1>();  // dQ
    pin_registers(r_dq);
    stage_dq<Traits>(shared, r_dq, late_warpgroup, tile, late_thread);
    hand_dq_over<Traits>(shared, warpgroup);
    wgmma_wait<0>();  // dK
    pin_registers(r_dk);
    pin_registers(r_ds);
    arrive(&shared.q_barriers.empty[stage]);
    m = work.next(m);
  }

  finish_own_keys<Traits>(params, shared, work, r_dk, r_dv, warpgroup, thread);
}

}  // namespace flash3::hopper
