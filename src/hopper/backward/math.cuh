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
// Under a band a warpgroup works on the steps alone that see one of its keys, and passes by the
// others of the block's: it writes zeros for dQ, and takes part in what both share.
//
// FlashAttention-2, alg. 2; FlashAttention-3, §3.1.
#pragma once

#include "hopper/backward/add_dq.cuh"
#include "hopper/backward/kernel.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/backward/store.cuh"
#include "hopper/device/constant.cuh"

namespace flash3::hopper {

// Waits for the other consumer warpgroup, which comes here in another loop: who waits at a hardware
// barrier does so at one place (compute-sanitizer's synccheck), and so each has its own, which the
// other only arrives at. In turn two of them: the next but one is behind the other's next.
__device__ __forceinline__ void meet(int warpgroup, int tile) {
  static_assert(kConsumerWarpgroups == 2);
  constexpr int kThreads = kConsumerWarpgroups * kWarpgroupThreads;
  const int pair = tile % 2 * kConsumerWarpgroups;
  arrive(NamedBarrier::kScoreGradient, pair + 1 - warpgroup, kThreads);
  sync(NamedBarrier::kScoreGradient, pair + warpgroup, kThreads);
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
  constexpr int kSteps = kTileM / kStepQueries;
  constexpr int kColumnBlocks = Traits::kHeadDim / 64;
  static_assert(Traits::kOwnQuads == 8, "one 64 x 64 block of dQ a warpgroup");
  // The register operand of S and dP, where there is room for it: half the reads of shared memory.
  constexpr bool kKeysInRegisters = Traits::kHeadDim == 64;

  // Where the band's edge crosses the block, a warpgroup's keys are seen by fewer queries than
  // those of both: it passes by the others. Not under a softcap, which has no registers for it.
  constexpr bool kPassBy = Traits::kBand && !Traits::kCapped;

  // Where there is no room for it, the LSE is read as it is needed.
  constexpr bool kLseAhead = !(kKeysInRegisters && Traits::kCapped);

  const int thread = thread_in_warpgroup();
  const StepMask<Traits> mask(shared, warpgroup * kWarpgroupRows, thread);
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
  // Under a softcap P is rounded while dS of the step before may still be read.
  uint32_t r_capped_p[kStepQueries / 4];
  uint32_t(&r_p)[kStepQueries / 4] = Traits::kCapped ? r_capped_p : r_a;
  uint32_t r_k[KTile::kCols / 4], r_v[VTile::kCols / 4];

  // Q's ring; the tile-th dOut lies in stage tile % 2, where it is the tile / 2-th, as does dS.
  PipelineState<Traits::kQStages> q_state;
  const auto issue_s = [&](int step_in_tile) {
    const Descriptor q =
        q_rows + (q_state.stage * QTile::kBytes + step_in_tile * kStepQueries * QTile::kRowBytes);
    if constexpr (kKeysInRegisters) {
      issue_transposed_scores<kElement, QTile>(r_s, r_k, q);
    } else {
      issue_transposed_scores<kElement, KTile, QTile>(r_s, k_rows, q);
    }
  };
  const auto wait_for_q = [&] {
    wait(&shared.q_barriers.full[q_state.stage], q_state.phase, BarrierName::kQFull);
  };

  const int head_tiles = work.query_tiles(), tiles = head_tiles * params.heads_per_kv_head;
  int tile = 0, m = work.query_tile_begin;
  float2 r_lse[kStepQueries / 8];
  // Scores of the tile's first step that this warpgroup has, when none are ahead.
  const auto begin_scores = [&](int step) {
    wait_for_q();
    issue_s(step);
    if constexpr (kLseAhead)
      load_rows(r_lse, shared.lse[q_state.stage] + step * kStepQueries, thread);
    wgmma_wait<0>();
    pin_registers(r_s);
  };
  const auto release_previous_q = [&] {
    const int q_stage = q_state.stage;
    arrive(&shared.q_barriers.empty[q_stage == 0 ? Traits::kQStages - 1 : q_stage - 1]);
  };

  // A tile, or one of its steps: `count` from first_step on. The scores of the first are there;
  // what it leaves behind are those of step next_step of the next tile, and dK in flight.
  // Behind another: dQ of the tile before is still to be handed over, and its Q to be released.
  const auto work_on_tile = [&](auto count, int first_step, bool behind, int next_step) {
    constexpr int kCount = count.value;
    const int stage = tile % 2, q_stage = q_state.stage;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int step = kCount == kSteps ? i : first_step, first_row = step * kStepQueries;
      const bool last = i == kCount - 1;
      if (i == 0) wait(&shared.dout_barriers.full[stage], tile / 2 % 2, BarrierName::kDoutFull);
      const Descriptor dout =
          dout_rows + (stage * DoutTile::kBytes + first_row * DoutTile::kRowBytes);
      if constexpr (kKeysInRegisters) {
        issue_transposed_scores<kElement, DoutTile>(r_dp, r_v, dout);
      } else {
        issue_transposed_scores<kElement, VTile, DoutTile>(r_dp, v_rows, dout);
      }
      if constexpr (Traits::kCapped) confine(params.softcap, r_s);
      mask.apply(r_s, m * kTileM + first_row, thread);
      if (kLseAhead && i > 0) load_rows(r_lse, shared.lse[q_stage] + first_row, thread);
      const auto lse = [&](int pair) {
        return kLseAhead ? r_lse[pair]
                         : load_row_pair(shared.lse[q_stage] + first_row, pair, thread);
      };
      if constexpr (Traits::kCapped) {
        compute_capped_probabilities<kElement>(r_s, r_p, params.softcap, params.scale_log2, lse);
      } else {
        compute_probabilities(r_s, params.scale_log2, lse);
      }
      // Here, since the fence before it would hold the exponentials up.
      if (i == 0 && behind) hand_dq_over<Traits>(shared, warpgroup);
      wgmma_wait<1>();  // dK of the step before
      pin_registers(r_dk);
      if (kSteps > 1) pin_registers(r_a);
      if (i == 0 && behind) release_previous_q();
      if constexpr (!Traits::kCapped) pack_probabilities<kElement>(r_s, r_p);
      issue_gradient<kElement, DoutTile>(
          r_dv, r_p, dout_columns + (stage * DoutTile::kBytes + DoutTile::mn_step(first_row)));

      float2 r_delta[kStepQueries / 8];
      load_rows(r_delta, shared.delta[stage] + first_row, thread);
      wgmma_wait<1>();  // dP
      pin_registers(r_dp);
      subtract_delta(r_dp, r_s, [&](int pair) { return r_delta[pair]; });
      wgmma_wait<0>();  // dV
      pin_registers(r_dv);
      pin_registers(r_p);
      pack_probabilities<kElement>(r_dp, r_a);
      if (last) {
        arrive(&shared.dout_barriers.empty[stage]);
        q_state.advance();
        if (tile + 1 < tiles) wait_for_q();
      }
      // Behind the last tile the scores of whatever lies there: a branch around the product would
      // make ptxas give the asynchronous pipeline up (C7512).
      issue_s(last ? next_step : step + 1);
      store_ds<DsTile>(shared.ds[stage], r_a, first_row, warpgroup, thread);
      const Descriptor q_now = q_columns + (q_stage * QTile::kBytes + QTile::mn_step(first_row));
      if (!last) {
        issue_gradient<kElement, QTile>(r_dk, r_a, q_now);
        wgmma_wait<1>();  // S of the next step
        pin_registers(r_s);
        continue;
      }
      if constexpr (kCount < kSteps)
        clear_ds<DsTile>(shared.ds[stage], kStepQueries - first_row, kStepQueries, warpgroup,
                         thread);

      fence_shared_for_async_proxy();
      meet(warpgroup, tile);
      float r_dq[32];
      issue_dq_block<kElement, DsTile, KTile>(
          r_dq,
          ds_rows + (stage * DsTile::kBytes + warpgroup / kColumnBlocks * 64 * DsTile::kRowBytes),
          k_columns + warpgroup % kColumnBlocks * KTile::kChunkBytes);
      if constexpr (kKeysInRegisters) {
        issue_gradient<kElement, QTile>(r_dk, r_a, q_now);
      } else {
        issue_gradient_shared<kElement, DsTile, QTile>(
            r_dk, ds_columns + (stage * DsTile::kBytes + DsTile::mn_step(first_row)), q_now);
      }

      wgmma_wait<1>();  // S of the next tile, dQ
      pin_registers(r_dq);
      pin_registers(r_s);
      // Behind the last tile once more its own.
      if constexpr (kLseAhead)
        load_rows(r_lse,
                  shared.lse[tile + 1 < tiles ? q_state.stage : q_stage] + next_step * kStepQueries,
                  thread);
      stage_dq<Traits>(shared, r_dq, warpgroup, tile, thread);
    }
    m = work.next(m);
    ++tile;
  };
  const auto finish_dk = [&] {
    wgmma_wait<0>();
    pin_registers(r_dk);
  };

  // A tile whose queries see keys of the other warpgroup alone: half of its dQ is this one's.
  const auto pass_by = [&] {
    const int stage = tile % 2, q_stage = q_state.stage;
    clear_ds<DsTile>(shared.ds[stage], 0, kTileM, warpgroup, thread);
    wait(&shared.dout_barriers.full[stage], tile / 2 % 2, BarrierName::kDoutFull);
    arrive(&shared.dout_barriers.empty[stage]);
    wait_for_q();
    arrive(&shared.q_barriers.empty[q_stage]);
    q_state.advance();
    fence_shared_for_async_proxy();
    meet(warpgroup, tile);
    const int other = (1 - warpgroup) * kWarpgroupRows;
    float r_dq[32];
    issue_dq_block<kElement, DsTile, KTile, kWarpgroupRows>(
        r_dq,
        ds_rows + (stage * DsTile::kBytes + warpgroup / kColumnBlocks * 64 * DsTile::kRowBytes +
                   (1 - warpgroup) * DsTile::kChunkBytes),
        k_columns + (warpgroup % kColumnBlocks * KTile::kChunkBytes + KTile::mn_step(other)));
    wgmma_wait<0>();
    pin_registers(r_dq);
    stage_dq<Traits>(shared, r_dq, warpgroup, tile, thread);
    hand_dq_over<Traits>(shared, warpgroup);
    m = work.next(m);
    ++tile;
  };

  wait(&shared.k_full, 0, BarrierName::kKFull);
  if constexpr (kKeysInRegisters) load_operand<KTile>(r_k, shared.k, warpgroup * 64, thread);
  const auto take_v = [&] {
    wait(&shared.v_full, 0, BarrierName::kVFull);
    if constexpr (kKeysInRegisters) load_operand<VTile>(r_v, shared.v, warpgroup * 64, thread);
  };
  if constexpr (kPassBy) {
    const int first_key = work.key + warpgroup * kWarpgroupRows;
    const KeysWalk walk =
        keys_walk(work, {first_key, first_key + kWarpgroupRows}, kTileM, kStepQueries);
    const int before = uniform(walk.before), whole = uniform(walk.whole),
              after = uniform(walk.after);
    const bool late = uniform(walk.late), early = uniform(walk.early);
    const bool any = uniform(!walk.empty());
    const int first_step = late;              // of a head
    const bool on_end = before + after == 0;  // a head's last tile and the next one's first
    bool scores_there = before == 0 && any;   // of first_step
    bool behind = false;                      // a tile whose dQ is to be handed over
    if (scores_there) begin_scores(first_step);
    take_v();
#pragma unroll 1
    for (int head = 0; head < params.heads_per_kv_head; ++head) {
#pragma unroll 1
      for (int i = 0; i < before; ++i) pass_by();
      if (any) {
        if (!scores_there) begin_scores(first_step);
        // Where tiles of another kind follow, dK is waited for: in flight, it would cost registers.
        if constexpr (kSteps > 1) {
          if (late) {
            work_on_tile(Constant<1>{}, 1, behind, whole > 0 || early ? 0 : first_step);
            finish_dk();
            behind = true;
          }
        }
#pragma unroll 1
        for (int i = 0; i < whole; ++i) {
          work_on_tile(Constant<kSteps>{}, 0, behind, i + 1 < whole || early ? 0 : first_step);
          behind = true;
        }
        finish_dk();
        if constexpr (kSteps > 1) {
          if (early) {
            work_on_tile(Constant<1>{}, 0, behind, first_step);
            finish_dk();
            behind = true;
          }
        }
        scores_there = on_end;
        if (!on_end) {
          hand_dq_over<Traits>(shared, warpgroup);
          release_previous_q();
          behind = false;
        }
      }
#pragma unroll 1
      for (int i = 0; i < after; ++i) pass_by();
    }
    if (behind) hand_dq_over<Traits>(shared, warpgroup);
  } else {
    if (tiles > 0) begin_scores(0);
    take_v();
#pragma unroll 1
    while (tile < tiles) work_on_tile(Constant<kSteps>{}, 0, tile > 0, 0);
    if (tiles > 0) hand_dq_over<Traits>(shared, warpgroup);
    finish_dk();
  }

  finish_own_keys<Traits>(params, shared, work, r_dk, r_dv, warpgroup, thread);
}

}  // namespace flash3::hopper
