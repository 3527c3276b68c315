// The consumer: one warpgroup, 64 keys, whose dK and dV stay in its registers. Scores are computed
// transposed, keys × queries, so that P and dS come out of the tensor cores as they go back in: as
// the register operand of dV = Pᵀ·dOut and dK = dSᵀ·Q. Only dQ needs the keys of all warpgroups: dS
// goes through shared memory for it. Per query tile i, in the order of issue
//
//   dPᵀ_i = V·dOut_iᵀ          asynchronous, as all products
//   Pᵀ_i = exp2(Sᵀ_i − lse)    S_i was issued a tile before
//   dV += Pᵀ_i·dOut_i
//   wait dPᵀ_i; dSᵀ_i = Pᵀ_i ∘ (dPᵀ_i − delta)
//   Sᵀ_{i+1} = K·Q_{i+1}ᵀ
//   dS_i to shared memory; the warpgroups meet
//   dQ_i = dS_i·K, this warpgroup's blocks of it
//   dK += dSᵀ_i·Q_i
//   wait dQ_i; stage it for the warp that adds it to the sums in global memory (add_dq.cuh)
//
// FlashAttention-2, alg. 2; FlashAttention-3, §3.1.
#pragma once

#include "hopper/backward/kernel.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/backward/store.cuh"

namespace flash3::hopper {

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
  static_assert(Traits::kDoutStages == 2);
  constexpr int kSteps = kTileM / kStepQueries;
  constexpr int kDqBlocks = Traits::kConfig.dq_blocks();
  constexpr int kOwnBlocks = Traits::kOwnBlocks;
  constexpr int kColumnBlocks = Traits::kHeadDim / 64;

  const int thread = thread_in_warpgroup();
  const StepMask<Traits::kBand> mask(params, work.key + warpgroup * kWarpgroupRows);
  const Descriptor k_rows =
      descriptor(KTile::kMajorK, shared.k) + warpgroup * 64 * KTile::kRowBytes;
  const Descriptor v_rows =
      descriptor(VTile::kMajorK, shared.v) + warpgroup * 64 * VTile::kRowBytes;
  const Descriptor k_columns = descriptor(KTile::kMajorMN, shared.k);
  const Descriptor q_rows = descriptor(QTile::kMajorK, shared.q);
  const Descriptor q_columns = descriptor(QTile::kMajorMN, shared.q);
  const Descriptor dout_rows = descriptor(DoutTile::kMajorK, shared.dout);
  const Descriptor dout_columns = descriptor(DoutTile::kMajorMN, shared.dout);
  const Descriptor ds_columns =
      descriptor(DsTile::kMajorMN, shared.ds) + warpgroup * DsTile::kChunkBytes;
  const Descriptor ds_rows = descriptor(DsTile::kMajorK, shared.ds);

  float r_dk[Traits::kHeadDim / 2] = {}, r_dv[Traits::kHeadDimV / 2] = {};
  float r_s[kStepQueries / 2], r_dp[kStepQueries / 2];
  uint32_t r_a[kStepQueries / 4];  // P, then dS, as the operand of dV and dK

  // Q's ring; the tile-th dOut lies in stage tile % 2, where it is the tile / 2-th, as does dS.
  PipelineState<Traits::kQStages> q_state;
  const auto issue_s = [&](int step_in_tile) {
    issue_transposed_scores<kElement, KTile, QTile>(
        r_s, k_rows,
        q_rows + (q_state.stage * QTile::kBytes + step_in_tile * kStepQueries * QTile::kRowBytes));
  };
  const auto wait_for_q = [&] {
    wait(&shared.q_barriers.full[q_state.stage], q_state.phase, BarrierName::kQFull);
  };

  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  int m = work.query_tile_begin;
  // Until dQ has been handed over `times` times and taken.
  const auto wait_for_dq_slot = [&](int times) {
    wait(&shared.dq_empty[warpgroup], (times & 1) ^ 1, BarrierName::kDqEmpty);
  };
  const auto hand_dq_over = [&] {
    fence_shared_for_async_proxy();
    arrive(NamedBarrier::kOutputStaged, warpgroup, kWarpgroupThreads + 32);
  };

  const auto stage_blocks = [&](const float(&r)[kOwnBlocks][32], int times) {
    wait_for_dq_slot(times);
#pragma unroll
    for (int i = 0; i < 8 * kOwnBlocks; ++i)
      store_shared(&shared.fragments[warpgroup * kOwnBlocks + i / 8][i % 8][thread],
                   &r[i / 8][4 * (i % 8)]);
  };
  float2 r_lse[kStepQueries / 8];
  wait(&shared.k_full, 0, BarrierName::kKFull);
  if (tiles > 0) {
    wait_for_q();
    issue_s(0);
    load_rows(r_lse, shared.lse[0], thread);
    wgmma_wait<0>();
    pin_registers(r_s);
  }
  wait(&shared.v_full, 0, BarrierName::kVFull);

#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2, q_stage = q_state.stage;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int first_row = step * kStepQueries;
      const bool last = step == kSteps - 1;
      if (step == 0) wait(&shared.dout_barriers.full[stage], tile / 2 % 2, BarrierName::kDoutFull);
      issue_transposed_scores<kElement, VTile, DoutTile>(
          r_dp, v_rows, dout_rows + (stage * DoutTile::kBytes + first_row * DoutTile::kRowBytes));
      mask.apply(params, r_s, m * kTileM + first_row, thread);
      if (step > 0) load_rows(r_lse, shared.lse[q_stage] + first_row, thread);
      compute_probabilities(r_s, params.scale_log2, r_lse);
      if (step == 0) hand_dq_over();
      wgmma_wait<1>();  // dK of the step before
      pin_registers(r_dk);
      if (kSteps > 1) pin_registers(r_a);
      if (step == 0 && tile > 0)
        release_stage(&shared.q_barriers.empty[q_stage == 0 ? Traits::kQStages - 1 : q_stage - 1],
                      thread);
      pack_probabilities<kElement>(r_s, r_a);
      issue_gradient<kElement, DoutTile>(
          r_dv, r_a, dout_columns + (stage * DoutTile::kBytes + DoutTile::mn_step(first_row)));

      float2 r_delta[kStepQueries / 8];
      load_rows(r_delta, shared.delta[stage] + first_row, thread);
      wgmma_wait<1>();  // dP
      pin_registers(r_dp);
      subtract_delta(r_dp, r_s, r_delta);
      wgmma_wait<0>();  // dV
      pin_registers(r_dv);
      pin_registers(r_a);
      pack_probabilities<kElement>(r_dp, r_a);
      if (last) {
        release_stage(&shared.dout_barriers.empty[stage], thread);
        q_state.advance();
        if (tile + 1 < tiles) wait_for_q();
      }
      // Behind the last tile the scores of whatever lies there: a branch around the product would
      // make ptxas give the asynchronous pipeline up (C7512).
      issue_s(last ? 0 : step + 1);
      store_ds<DsTile>(shared.ds[stage], r_a, first_row, warpgroup, thread);
      const Descriptor q_now = q_columns + (q_stage * QTile::kBytes + QTile::mn_step(first_row));
      if (!last) {
        issue_gradient<kElement, QTile>(r_dk, r_a, q_now);
        wgmma_wait<1>();  // S of the next step
        pin_registers(r_s);
        continue;
      }

      fence_shared_for_async_proxy();
      sync(NamedBarrier::kScoreGradient, 0, Traits::kWarpgroups * kWarpgroupThreads);
      float r_dq[kOwnBlocks][32];
#pragma unroll
      for (int i = 0; i < kOwnBlocks; ++i) {
        const int block = warpgroup * kOwnBlocks + i;
        issue_dq_block<kElement, DsTile, KTile>(
            r_dq[i],
            ds_rows + (stage * DsTile::kBytes + block / kColumnBlocks * 64 * DsTile::kRowBytes),
            k_columns + block % kColumnBlocks * KTile::kChunkBytes);
      }
      issue_gradient_shared<kElement, DsTile, QTile>(
          r_dk, ds_columns + (stage * DsTile::kBytes + DsTile::mn_step(first_row)), q_now);

      wgmma_wait<1>();  // S of the next tile, dQ
#pragma unroll
      for (int i = 0; i < kOwnBlocks; ++i) pin_registers(r_dq[i]);
      pin_registers(r_s);
      load_rows(r_lse, shared.lse[q_state.stage], thread);
      stage_blocks(r_dq, tile + 1);
    }
    m = work.next(m);
  }
  if (tiles > 0) {
    hand_dq_over();
    wait_for_dq_slot(tiles + 1);  // the barrier serves the epilogue too
  }
  wgmma_wait<0>();
  pin_registers(r_dk);

  // K and V lie where the gradients are staged: all have read K.
  sync(NamedBarrier::kScoreGradient, 0, Traits::kWarpgroups * kWarpgroupThreads);
#pragma unroll
  for (float& x : r_dk) x *= params.softmax_scale;
  finish_gradient<kElement, VTile>(params.dv_by_tma ? &params.dv : nullptr, params.dv_out,
                                   params.head_dim_v, params.seq_k, work, shared.v, r_dv, warpgroup,
                                   NamedBarrier::kOutputStaged, warpgroup, thread);
  finish_gradient<kElement, KTile>(params.dk_by_tma ? &params.dk : nullptr, params.dk_out,
                                   params.head_dim, params.seq_k, work, shared.k, r_dk, warpgroup,
                                   NamedBarrier::kOutputStaged, warpgroup, thread);
}

}  // namespace flash3::hopper
