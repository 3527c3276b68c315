// SPDX-License-Identifier: Apache-2.0
// The consumer: one warpgroup, 64 query rows. Per key tile j, in the order of issue
//
//   S_j = Q·K_jᵀ             asynchronous
//   O += P_{j−1}·V_{j−1}     asynchronous: runs under the softmax of S_j (two-stage overlap)
//   wait S_j; mask; first half of P_j = online softmax
//   wait O; O ·= α_j; second half of P_j, while the first half is rounded
//
// and the warpgroups take turns to issue (ping-pong): one's softmax runs under the other's GEMMs.
// FlashAttention-3, §3.1–3.2. ForwardSchedule takes parts of this away, for benchmarks, or adds the
// third stage that the paper describes:
//
//   S_{j+1} = Q·K_{j+1}ᵀ     asynchronous
//   O += P_{j−1}·V_{j−1}     asynchronous
//   P_j = online softmax of S_j, under both
//   wait both; O ·= α_j
#pragma once

#include "hopper/device/band_mask.cuh"
#include "hopper/device/constant.cuh"
#include "hopper/device/online_softmax.cuh"
#include "hopper/device/ping_pong.cuh"
#include "hopper/forward/kernel.cuh"
#include "hopper/forward/load_unspecialised.cuh"
#include "hopper/forward/rows.cuh"
#include "hopper/forward/store.cuh"

namespace flash3::hopper {

// The work tiles as a consumer learns of them.
template <class Traits>
__device__ __forceinline__ auto consumer_tiles(const ForwardParams& params,
                                               typename Traits::Shared& shared) {
  if constexpr (Traits::kSchedule.specialised) {
    return TileReader{shared.tiles};
  } else {
    return OwnTiles<Traits>{params.schedule};
  }
}

template <class Traits>
__device__ __forceinline__ void consume(const ForwardParams& params,
                                        typename Traits::Shared& shared, int warpgroup) {
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using Softmax = OnlineSoftmax<Score<Traits::kScore>>;
  constexpr Element kElement = Traits::kElement;
  constexpr bool kCapped = Traits::kScore == ScoreKind::kSoftcap;
  constexpr int kTileN = Traits::kTileN;
  constexpr int kHalf = kTileN / 4 / 8 * 8;  // of a thread's scores
  // Rescaling a narrow O is cheaper than a branch that keeps the instructions on its two sides
  // apart.
  constexpr bool kAlwaysRescale = VTile::kCols <= 64;
  // Two warpgroups fall further apart where the turn goes on with the scores, three and four have
  // it sooner where it goes on with the products.
  constexpr bool kArriveLate = Traits::kWarpgroups == 2;
  // The band's edge then crosses key tiles that only other warpgroups see.
  constexpr bool kSkipMaskedTiles = Traits::kBand && kTileN < Traits::kTileM;
  // One copy of the softmax, not one a stage: less code to fetch. The registers of four warpgroups,
  // and of three with capped scores, do not do for stages that are no constants.
  constexpr bool kOneSoftmax = Traits::kWarpgroups < (kCapped ? 3 : 4);

  auto tiles = consumer_tiles<Traits>(params, shared);
  const PingPongBarrier<Traits::kWarpgroups, Traits::kSchedule.ping_pong, ForwardBarrier::kPingPong>
      ping_pong{warpgroup};
  const int thread = thread_in_warpgroup();
  const int row_in_warpgroup = thread / 32 * 16 + thread % 32 / 4;
  const int key_in_tile = thread % 4 * 2;

  const Descriptor k = descriptor(KTile::kMajorK, shared.k);
  const Descriptor v = descriptor(VTile::kMajorMN, shared.v);
  typename Traits::KvState k_state;  // V is where K was one tile, or in three stages two, ago
  typename Traits::QState q_state;

  // What a stage is read for is done: the loader may have it. Without one, the next load is due.
  OwnLoads<Traits> own{params, shared, warpgroup};
  const auto release_k = [&](int stage) {
    release(&shared.k_barriers.empty[stage], thread);
    if constexpr (!Traits::kSchedule.specialised) own.load_k();
  };
  const auto release_v = [&](int stage) {
    release(&shared.v_barriers.empty[stage], thread);
    if constexpr (!Traits::kSchedule.specialised) own.load_v();
  };
  // Q's slot, where the output lies, goes back to the loader when the output has left: that of each
  // warp, of which only the first stores but for slots.
  const auto release_q = [&](int stage) {
    if (thread % 32 == 0) {
      tma_store_wait_read();
      if constexpr (Traits::kSchedule.specialised)
        arrive(&shared.q_barriers[warpgroup].empty[stage]);
    }
    if constexpr (!Traits::kSchedule.specialised) own.load_q(stage);
  };
  bool release_previous_q = false;

  // Key tiles that other warpgroups' rows see and these do not: their stages pass by.
  const auto skip_masked_tiles = [&](int key_tiles) {
    for (; key_tiles > 0; --key_tiles) {
      wait(&shared.k_barriers.full[k_state.stage], k_state.phase, "k_full");
      release_k(k_state.stage);
      wait(&shared.v_barriers.full[k_state.stage], k_state.phase, "v_full");
      release_v(k_state.stage);
      k_state.advance();
      ping_pong.wait();
      ping_pong.arrive();
    }
  };

  if constexpr (!Traits::kSchedule.specialised) own.begin();
  ping_pong.start();
  const OutputRows rows{params, shared.own_rows[4 * warpgroup + thread / 32]};
  RowKeys(&row_keys)[kWarpRows] = shared.row_keys[4 * warpgroup + thread / 32];
  while (uniform(tiles.next())) {
    const WorkTile& work = tiles.tile();
    // Numbers that are known to be uniform: branches on them then need no convergence barrier, and
    // addresses of stages stay in uniform registers.
    const int key_tile_begin = uniform(work.key_tile_begin),
              key_tile_end = uniform(work.key_tile_end);
    describe_rows<Traits::kBand>(params, work, tiles.slots(), warpgroup, thread / 32, thread % 32,
                                 shared.own_rows[4 * warpgroup + thread / 32], row_keys);

    const TileMask::Range queries = warpgroup_queries(params, work, warpgroup);
    TileMask::Range own{key_tile_begin, key_tile_end};
    if constexpr (kSkipMaskedTiles) own = seen_tiles(work, queries, own, kTileN);
    const int begin = own.begin, end = own.end;
    TileMask::Range unmasked = unmasked_tiles<Traits::kBand>(params, work, queries, kTileN);
    unmasked = {uniform(unmasked.begin), uniform(unmasked.end)};
    __syncwarp();
    tiles.release();
    if (key_tile_begin >= key_tile_end) {
      store_empty(params, rows, thread);
      continue;
    }
    if constexpr (kSkipMaskedTiles) skip_masked_tiles(key_tile_end - end);

    uint32_t r_p[kTileN / 4];
    float r_o[VTile::kCols / 2] = {};
    float alpha[2];
    Softmax softmax{Score<Traits::kScore>::of(params)};
    const auto begin_softmax = [&](float(&r_s)[kTileN / 2], int n) {
      const auto mask = [&] {
        mask_scores<Traits::kBand>(r_s, row_keys[row_in_warpgroup % kWarpRows],
                                   row_keys[row_in_warpgroup % kWarpRows + 8],
                                   n * kTileN + key_in_tile);
      };
      if constexpr (kCapped) {
        const bool masked = n < unmasked.begin || n >= unmasked.end;
        return softmax.begin_capped_tile(r_s, alpha, masked, mask);
      } else {
        if (n < unmasked.begin || n >= unmasked.end) mask();
        return softmax.begin_tile(r_s, alpha);
      }
    };

    int n = end - 1;
    auto& q_barriers = shared.q_barriers[warpgroup];
    const Descriptor q = descriptor(QTile::kMajorK, shared.q[q_state.stage][warpgroup]);
    wait(&q_barriers.full[q_state.stage], q_state.phase, "q_full");
    if constexpr (Traits::kSchedule.three_stage) {
      // The scores that the tensor cores write, and those that the softmax works on. The second are
      // a copy of the first: ptxas gives all products of one shape the same registers.
      static_assert(Traits::kStages == 2);
      float r_next[kTileN / 2], r_s[kTileN / 2];
      const auto issue_scores = [&](int stage) {
        wait(&shared.k_barriers.full[stage], k_state.phase, "k_full");
        issue_qk<kElement, QTile, KTile>(r_next, q, k + stage * KTile::kBytes);
      };
      const auto take_scores = [&](int stage) {
        fence_operand(r_next);
        release_k(stage);
#pragma unroll
        for (int i = 0; i < kTileN / 2; ++i) r_s[i] = r_next[i];
      };
      const auto issue_output = [&](int stage) {
        wait(&shared.v_barriers.full[stage], k_state.behind(2).phase, "v_full");
        issue_pv<kElement, VTile>(r_o, r_p, v + stage * VTile::kBytes);
      };
      const auto run_softmax = [&] {
        const bool raised = begin_softmax(r_s, n);
        softmax.template exponentiate<0, kTileN / 2>(r_s);
        order_before(softmax.row_sum[0] + softmax.row_sum[1]);  // not behind the next wait
        return raised;
      };
      const auto finish_output = [&](int stage, bool raised) {
        fence_operand(r_o);
        fence_operand(r_p);
        release_v(stage);
        if (kAlwaysRescale || raised) Softmax::scale_rows(r_o, alpha);
        pack_probabilities<kElement>(r_s, r_p);
      };

      issue_scores(k_state.stage);
      if (Traits::kQStages > 1 && release_previous_q) release_q(1 - q_state.stage);
      wgmma_wait<0>();
      take_scores(k_state.stage);
      k_state.advance();
      run_softmax();
      pack_probabilities<kElement>(r_s, r_p);

      if (n > key_tile_begin) {
        issue_scores(k_state.stage);
        wgmma_wait<0>();
        take_scores(k_state.stage);
        k_state.advance();

        // The stage: of K's next tile, and of V's that is two behind it.
        const auto step = [&](auto stage) {
          constexpr int kStage = stage.value;
          ping_pong.wait();
          issue_scores(kStage);
          issue_output(kStage);
          ping_pong.arrive();
          const bool raised = run_softmax();
          wgmma_wait<0>();
          finish_output(kStage, raised);
          take_scores(kStage);
        };
#pragma unroll 1
        for (--n; n > key_tile_begin; --n) {
          as_constant<2>(k_state.stage, step);
          k_state.advance();
        }
        issue_output(k_state.stage);
        const bool raised = run_softmax();
        wgmma_wait<0>();
        finish_output(k_state.stage, raised);
      }
    } else {
      float r_s[kTileN / 2];
      wait(&shared.k_barriers.full[k_state.stage], k_state.phase, "k_full");
      issue_qk<kElement, QTile, KTile>(r_s, q, k + k_state.stage * KTile::kBytes);
      if (Traits::kQStages > 1 && release_previous_q) release_q(1 - q_state.stage);
      wgmma_wait<0>();
      fence_operand(r_s);
      release_k(k_state.stage);
      k_state.advance();
      begin_softmax(r_s, n);
      softmax.template exponentiate<0, kTileN / 2>(r_s);
      pack_probabilities<kElement>(r_s, r_p);

      // V's ring is one stage behind K's.
      const auto stage_of_v = [](int stage) {
        return (stage + Traits::kStages - 1) % Traits::kStages;
      };
      const auto issue_scores = [&](int stage) {
        wait(&shared.k_barriers.full[stage], k_state.phase, "k_full");
        if constexpr (Traits::kSchedule.overlap) ping_pong.wait();
        issue_qk<kElement, QTile, KTile>(r_s, q, k + stage * KTile::kBytes);
      };
      const auto issue_output = [&](int stage) {
        const uint32_t phase = stage == Traits::kStages - 1 ? k_state.phase ^ 1 : k_state.phase;
        wait(&shared.v_barriers.full[stage], phase, "v_full");
        issue_pv<kElement, VTile>(r_o, r_p, v + stage * VTile::kBytes);
      };
      const auto finish_output = [&](int stage) {
        wgmma_wait<0>();
        fence_operand(r_o);
        fence_operand(r_p);
        release_v(stage);
      };
      const auto issue = [&](int stage) {
        if constexpr (!Traits::kSchedule.overlap) {
          // A turn is still P·V and Q·Kᵀ, but the softmax has none of its own products beside it.
          ping_pong.wait();
          issue_output(stage_of_v(stage));
          finish_output(stage_of_v(stage));
          issue_scores(stage);
        } else {
          issue_scores(stage);
          issue_output(stage_of_v(stage));
        }
      };
      const auto run_softmax = [&](int stage) {
        if constexpr (!kArriveLate || !Traits::kSchedule.overlap) ping_pong.arrive();
        wgmma_wait<Traits::kSchedule.overlap ? 1 : 0>();
        fence_operand(r_s);
        if constexpr (kArriveLate && Traits::kSchedule.overlap) ping_pong.arrive();
        release_k(stage);
        const bool raised = begin_softmax(r_s, n);
        if constexpr (Traits::kSchedule.overlap) {
          softmax.template exponentiate<0, kHalf>(r_s);
          finish_output(stage_of_v(stage));
        }
        if (kAlwaysRescale || raised) Softmax::scale_rows(r_o, alpha);
        softmax.template exponentiate<Traits::kSchedule.overlap ? kHalf : 0, kTileN / 2>(r_s);
        pack_probabilities<kElement>(r_s, r_p);
      };
#pragma unroll 1
      for (--n; n >= begin; --n) {
        // With the stage a constant, all addresses are.
        as_constant_then<Traits::kStages, kOneSoftmax>(k_state.stage, issue, run_softmax);
        k_state.advance();
      }
    }

    const auto v_state = k_state.behind(1);
    wait(&shared.v_barriers.full[v_state.stage], v_state.phase, "v_full");
    issue_pv<kElement, VTile>(r_o, r_p, v + v_state.stage * VTile::kBytes);
    float inverse_sum[2], lse[2];
    softmax.finish(inverse_sum, lse);
    add_sinks(params, rows, row_in_warpgroup, inverse_sum, lse);
    wgmma_wait<0>();
    fence_operand(r_o);
    release_v(v_state.stage);
    if constexpr (kSkipMaskedTiles) skip_masked_tiles(begin - key_tile_begin);

    Softmax::scale_rows(r_o, inverse_sum);
    store_lse(params, rows, row_in_warpgroup, lse);
    store_output<Traits>(params, rows, shared.q[q_state.stage][warpgroup], r_o, warpgroup, thread);
    // With a second slot, Q of the next tile is under way already, and this one's can wait.
    release_previous_q = Traits::kQStages > 1;
    if (!release_previous_q) release_q(q_state.stage);
    q_state.advance();
  }
  if (release_previous_q) tma_store_wait_read();  // a block's memory must outlive its stores
  ping_pong.finish();
}

}  // namespace flash3::hopper
