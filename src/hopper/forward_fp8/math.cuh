// SPDX-License-Identifier: Apache-2.0
// The consumer: one warpgroup, 64 query rows. Per key tile j, in the order of issue
//
//   S_j = Q·K_jᵀ             asynchronous
//   O += P_{j−1}·V_{j−1}     asynchronous: runs under the maximum of S_j
//   wait S_j; hand the turn on; mask; maximum
//   wait O; O ·= α_j · v_{j−1} / v_j; P_j = 2^(S_j − m), rounded to e4m3 as it comes
//
// The wait for O stands before the exponentials, other than in the 16-bit kernels
// (forward/math.cuh): the product is short, the registers of P_{j−1} are free behind it, and
// rounding fills the gaps between the exponentials. The turn goes on when the scores are there, so
// that one warpgroup's exponentials fall into the other's products.
//
// O is in units of the present key tile's scale of V, v_j: the rescaling that the softmax needs
// anyway changes them too.
#pragma once

#include "hopper/device/constant.cuh"
#include "hopper/device/online_softmax.cuh"
#include "hopper/device/ping_pong.cuh"
#include "hopper/forward_fp8/kernel.cuh"
#include "hopper/forward_fp8/score.cuh"
#include "hopper/forward_fp8/store.cuh"

namespace flash3::hopper {

// Issues O += P·V, V turned by transpose.cuh, and commits it as one group.
template <class VTile, int kTileN>
__device__ __forceinline__ void issue_fp8_pv(float (&r_o)[VTile::kRows / 2],
                                             uint32_t (&r_p)[kTileN / 8], Descriptor v) {
  fence_operand(r_o);
  fence_operand(r_p);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < kTileN; key += VTile::kStep)
    Wgmma<Element::kE4m3, VTile::kRows>::rs(r_o, &r_p[key / 8], v + VTile::k_step(key), true);
  wgmma_commit();
}

// Brings the columns of each block of scales to the tile's, the largest; `first_keys` keys of the
// tile lie in its first block.
template <int kBlocks, int N>
__device__ __forceinline__ void scale_columns(float (&r_s)[N], const float (&scales)[kBlocks],
                                              int first_keys) {
  const float largest = KeyScales<kBlocks>::largest(scales);
  float part[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) part[b] = scales[b] / largest;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int column = j / 4 * 8;
    float factor = part[0];
#pragma unroll
    for (int b = 1; b < kBlocks; ++b)
      if (column >= first_keys + (b - 1) * int(kScaleBlock)) factor = part[b];
    r_s[j] *= factor;
  }
}

// The score accumulator becomes the A operand of the next product: a thread's four scores of 16
// keys of a row are the four bytes of a register, in V's order of keys (transpose.cuh).
template <int N>
__device__ __forceinline__ void pack_fp8_probabilities(const float (&r_s)[N],
                                                       uint32_t (&r_p)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float* r = &r_s[i / 2 * 8 + i % 2 * 2];  // 16 keys, upper or lower row
    r_p[i] = pack4_e4m3(r[0], r[1], r[4], r[5]);
  }
}

template <class Traits>
__device__ __forceinline__ void consume_fp8(const ForwardParams& params,
                                            typename Traits::Shared& shared, int warpgroup) {
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using Scales = typename Traits::Scales;
  using Score = Fp8Score<Traits::kScore, Traits::kSchedule.lazy_maximum>;
  using Softmax = OnlineSoftmax<Score>;
  constexpr int kTileN = Traits::kTileN;
  // The band's edge then crosses key tiles that only other warpgroups see.
  constexpr bool kSkipMaskedTiles = Traits::kBand && kTileN < Traits::kTileM;
  // One copy of the softmax, not one a stage: less code to fetch. Three and four warpgroups'
  // registers do not do for stages that are no constants.
  constexpr bool kOneSoftmax = Traits::kWarpgroups == 2;

  TileReader tiles{shared.tiles};
  const PingPongBarrier<Traits::kWarpgroups, Traits::kSchedule.ping_pong, ForwardBarrier::kPingPong>
      ping_pong{warpgroup};
  const int thread = thread_in_warpgroup();
  const int row_in_warpgroup = thread / 32 * 16 + thread % 32 / 4;
  const int key_in_tile = thread % 4 * 2;

  const Descriptor k = descriptor(KTile::kMajorK, shared.k);
  const Descriptor v = descriptor(VTile::kMajorK, shared.v);
  typename Traits::KvState k_state;  // V is where K was one tile ago
  typename Traits::QState q_state;

  // Key tiles that other warpgroups' rows see and these do not: their stages pass by.
  const auto skip_masked_tiles = [&](int key_tiles) {
    for (; key_tiles > 0; --key_tiles) {
      wait(&shared.k_barriers.full[k_state.stage], k_state.phase, "k_full");
      release(&shared.k_barriers.empty[k_state.stage], thread);
      wait(&shared.v_barriers.full[k_state.stage], k_state.phase, "v_full");
      release(&shared.v_barriers.empty[k_state.stage], thread);
      k_state.advance();
      ping_pong.wait();
      ping_pong.arrive();
    }
  };

  ping_pong.start();
  const int warp = 4 * warpgroup + warp_in_warpgroup();
  const OutputRows rows{params, shared.own_rows[warp]};
  RowKeys(&row_keys)[kWarpRows] = shared.row_keys[warp];
  while (uniform(tiles.next())) {
    const WorkTile& work = tiles.tile();
    const int key_tile_begin = uniform(work.key_tile_begin),
              key_tile_end = uniform(work.key_tile_end);
    describe_rows<Traits::kBand>(params, work, nullptr, warpgroup, warp % 4, thread % 32,
                                 shared.own_rows[warp], row_keys);
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
    float r_s[kTileN / 2];
    uint32_t r_p[kTileN / 8];
    float r_o[VTile::kRows / 2] = {};
    float alpha[2];

    int n = end - 1;
    auto& q_barriers = shared.q_barriers[warpgroup];
    wait(&q_barriers.full[q_state.stage], q_state.phase, "q_full");
    const Descriptor q = descriptor(QTile::kMajorK, shared.q[q_state.stage][warpgroup]);
    const auto issue_scores = [&](int stage) {
      issue_qk<Element::kE4m3, QTile, KTile>(r_s, q, k + stage * KTile::kBytes);
    };
    Softmax softmax{Score::of(params)};
    // Where a key tile lies in several blocks of scales they seldom differ.
    const auto keys_in_first_block = [&] {
      return int(kScaleBlock) - n * kTileN % int(kScaleBlock);
    };
    const auto begin_softmax = [&](const Scales& scales) {
      if (scales.differ()) scale_columns(r_s, scales.k, keys_in_first_block());
      const auto mask = [&] {
        mask_scores<Traits::kBand>(r_s, row_keys[thread % 32 / 4], row_keys[thread % 32 / 4 + 8],
                                   n * kTileN + key_in_tile);
      };
      const bool masked = n < unmasked.begin || n >= unmasked.end;
      if constexpr (Score::kCapped) {
        softmax.score.scale_scores(r_s);
        return softmax.begin_capped_tile(r_s, alpha, masked, mask);
      } else {
        if (masked) mask();
        return softmax.begin_tile(r_s, alpha);
      }
    };
    // Rounding stands beside the exponentials on either side: behind a branch it would come after
    // all of them.
    const auto make_probabilities = [&](const Scales& scales) {
      if (!scales.differ()) {
        softmax.template exponentiate<0, kTileN / 2>(r_s);
        pack_fp8_probabilities(r_s, r_p);
      } else {
        softmax.template exponentiate<0, kTileN / 2>(r_s);
        scale_columns(r_s, scales.v, keys_in_first_block());
        pack_fp8_probabilities(r_s, r_p);
      }
    };
    wait(&shared.k_barriers.full[k_state.stage], k_state.phase, "k_full");
    issue_scores(k_state.stage);
    const float& q_scale = shared.q_scales[q_state.stage][warpgroup];
    const Scales& first_scales = shared.key_scales[k_state.phase][k_state.stage];
    softmax.score.begin_tile(q_scale * params.fp8.q_factor, Scales::largest(first_scales.k));
    __syncwarp();  // a warp's arrival below is for what its threads have read too
    wgmma_wait<0>();
    fence_operand(r_s);
    release(&shared.k_barriers.empty[k_state.stage], thread);
    k_state.advance();
    begin_softmax(first_scales);
    make_probabilities(first_scales);

    // V's ring is one stage behind K's.
    const auto stage_of_v = [](int stage) {
      return (stage + Traits::kStages - 1) % Traits::kStages;
    };
    const auto phase_of_v = [&](int stage) {
      return stage == 0 ? k_state.phase ^ 1 : k_state.phase;
    };
    const auto issue = [&](int stage) {
      const int stage_v = stage_of_v(stage);
      wait(&shared.k_barriers.full[stage], k_state.phase, "k_full");
      ping_pong.wait();
      issue_scores(stage);
      wait(&shared.v_barriers.full[stage_v], phase_of_v(stage), "v_full");
      issue_fp8_pv<VTile, kTileN>(r_o, r_p, v + stage_v * VTile::kBytes);
    };
    const auto run_softmax = [&](int stage) {
      const int stage_v = stage_of_v(stage);
      const Scales& scales = shared.key_scales[k_state.phase][stage];
      softmax.score.begin_tile(q_scale * params.fp8.q_factor, Scales::largest(scales.k));
      __syncwarp();
      wgmma_wait<Traits::kSchedule.overlap ? 1 : 0>();
      fence_operand(r_s);
      ping_pong.arrive();
      release(&shared.k_barriers.empty[stage], thread);
      bool rescale = begin_softmax(scales);

      wgmma_wait<0>();
      fence_operand(r_o);
      fence_operand(r_p);
      release(&shared.v_barriers.empty[stage_v], thread);
      const float v_scale = Scales::largest(scales.v),
                  previous_v_scale =
                      Scales::largest(shared.key_scales[phase_of_v(stage)][stage_v].v);
      if (v_scale != previous_v_scale) {
        const float ratio = previous_v_scale / v_scale;
        alpha[0] *= ratio, alpha[1] *= ratio;
        rescale = true;
      }
      if (rescale) Softmax::scale_rows(r_o, alpha);
      make_probabilities(scales);
    };
#pragma unroll 1
    for (--n; n >= begin; --n) {
      // With the stage a constant, all addresses are.
      as_constant_then<Traits::kStages, kOneSoftmax>(k_state.stage, issue, run_softmax);
      k_state.advance();
    }

    const auto v_state = k_state.behind(1);
    wait(&shared.v_barriers.full[v_state.stage], v_state.phase, "v_full");
    issue_fp8_pv<VTile, kTileN>(r_o, r_p, v + v_state.stage * VTile::kBytes);
    float inverse_sum[2], lse[2];
    softmax.finish(inverse_sum, lse);
    add_sinks(params, rows, row_in_warpgroup, inverse_sum, lse);
    const float v_scale = Scales::largest(shared.key_scales[v_state.phase][v_state.stage].v);
    inverse_sum[0] *= v_scale, inverse_sum[1] *= v_scale;
    release(&q_barriers.empty[q_state.stage], thread);
    q_state.advance();
    wgmma_wait<0>();
    fence_operand(r_o);
    release(&shared.v_barriers.empty[v_state.stage], thread);
    if constexpr (kSkipMaskedTiles) skip_masked_tiles(begin - key_tile_begin);

    Softmax::scale_rows(r_o, inverse_sum);
    store_lse(params, rows, row_in_warpgroup, lse);
    store_fp8_output<Traits>(params, rows, r_o, row_in_warpgroup, thread);
  }
  ping_pong.finish();
}

}  // namespace flash3::hopper
