// The consumer: one warpgroup, 64 query rows. The order of issue is that of the 16-bit kernels
// (forward/math.cuh): per key tile j
//
//   S_j = Q·K_jᵀ             asynchronous
//   O += P_{j−1}·V_{j−1}     asynchronous: runs under the softmax of S_j
//   wait S_j; mask; first half of P_j = online softmax
//   wait O; O ·= α_j · v_{j−1} / v_j; second half of P_j; P_j rounded to e4m3
//
// O is in units of the present key tile's scale of V, v_j: the rescaling that the softmax needs
// anyway changes them too.
#pragma once

#include "hopper/device/constant.cuh"
#include "hopper/device/gemm_turn.cuh"
#include "hopper/device/online_softmax.cuh"
#include "hopper/device/ptx/ldmatrix.cuh"
#include "hopper/forward_fp8/kernel.cuh"
#include "hopper/forward_fp8/score.cuh"
#include "hopper/forward_fp8/store.cuh"

namespace flash3::hopper {

// Q's rows of a warpgroup as the A operand: element for element what ldmatrix loads.
template <class QTile>
__device__ __forceinline__ void load_q_fragments(uint32_t (&r_q)[QTile::kCols / 8],
                                                 const void* shared, int thread) {
  const uint32_t base = uint32_t(__cvta_generic_to_shared(shared));
  const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int col = 0; col < QTile::kCols; col += QTile::kStep)
    ldmatrix_x4(base + QTile::offset(row, col + lane / 16 * 16), &r_q[col / 8]);
}

// Issues S = Q·Kᵀ, Q in registers, and commits it as one group.
template <class KTile>
__device__ __forceinline__ void issue_fp8_qk(float (&r_s)[KTile::kRows / 2],
                                             uint32_t (&r_q)[KTile::kCols / 8], Descriptor k) {
  discard_registers(r_s);
  pin_registers(r_q);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < KTile::kCols; col += KTile::kStep)
    Wgmma<Element::kE4m3, KTile::kRows>::rs(r_s, &r_q[col / 8], k + KTile::k_step(col), col != 0);
  wgmma_commit();
}

// Issues O += P·V, V turned by transpose.cuh, and commits it as one group.
template <class VTile>
__device__ __forceinline__ void issue_fp8_pv(float (&r_o)[VTile::kRows / 2],
                                             uint32_t (&r_p)[VTile::kCols / 8], Descriptor v) {
  pin_registers(r_o);
  pin_registers(r_p);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < VTile::kCols; key += VTile::kStep)
    Wgmma<Element::kE4m3, VTile::kRows>::rs(r_o, &r_p[key / 8], v + VTile::k_step(key), true);
  wgmma_commit();
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
  using Score = Fp8Score<Traits::kScore, Traits::kSchedule.lazy_maximum>;
  using Softmax = OnlineSoftmax<Score>;
  constexpr int kTileN = Traits::kTileN;
  constexpr int kHalf = kTileN / 4 / 8 * 8;  // of a thread's scores
  // A product with few keys reads as much of Q as of K, and at this width shared memory binds. A
  // softcap needs the registers.
  constexpr bool kQInRegisters = KTile::kCols > 192 && Traits::kScore == ScoreKind::kPlain;

  TileReader tiles{shared.tiles};
  const GemmTurn<Traits::kWarpgroups, Traits::kSchedule.ping_pong> turn{warpgroup};
  const int thread = thread_in_warpgroup();
  const int row_in_warpgroup = thread / 32 * 16 + thread % 32 / 4;
  const int key_in_tile = thread % 4 * 2;

  const Descriptor k = descriptor(KTile::kMajorK, shared.k);
  const Descriptor v = descriptor(VTile::kMajorK, shared.v);
  typename Traits::KvState k_state;  // V is where K was one tile ago
  typename Traits::QState q_state;

  turn.start();
  const int warp = 4 * warpgroup + warp_in_warpgroup();
  const OutputRows rows{params, shared.own_rows[warp]};
  RowKeys(&row_keys)[kWarpRows] = shared.row_keys[warp];
  while (uniform(tiles.next())) {
    const WorkTile& work = tiles.tile();
    const int begin = uniform(work.key_tile_begin), end = uniform(work.key_tile_end);
    describe_rows<Traits::kBand>(params, work, nullptr, warpgroup, warp % 4, thread % 32,
                                 shared.own_rows[warp], row_keys);
    const TileMask::Range queries = warpgroup_queries(params, work, warpgroup);
    TileMask::Range unmasked = unmasked_tiles<Traits::kBand>(params, work, queries, kTileN);
    unmasked = {uniform(unmasked.begin), uniform(unmasked.end)};
    __syncwarp();
    tiles.release();
    if (begin >= end) {
      store_empty(params, rows, thread);
      continue;
    }
    const auto mask = [&](float(&r_s)[kTileN / 2], int n) {
      if (n < unmasked.begin || n >= unmasked.end)
        mask_scores<Traits::kBand>(r_s, row_keys[thread % 32 / 4], row_keys[thread % 32 / 4 + 8],
                                   n * kTileN + key_in_tile);
    };

    float r_s[kTileN / 2];
    uint32_t r_p[kTileN / 8];
    float r_o[VTile::kRows / 2] = {};
    float alpha[2];

    int n = end - 1;
    auto& q_barriers = shared.q_barriers[warpgroup];
    wait(&q_barriers.full[q_state.stage], q_state.phase, BarrierName::kQFull);
    const Descriptor q = descriptor(QTile::kMajorK, shared.q[q_state.stage][warpgroup]);
    uint32_t r_q[kQInRegisters ? QTile::kCols / 8 : 1];
    if constexpr (kQInRegisters)
      load_q_fragments<QTile>(r_q, shared.q[q_state.stage][warpgroup], thread);
    const auto issue_scores = [&](int stage) {
      if constexpr (kQInRegisters) {
        issue_fp8_qk<KTile>(r_s, r_q, k + stage * KTile::kBytes);
      } else {
        issue_qk<Element::kE4m3, QTile, KTile>(r_s, q, k + stage * KTile::kBytes);
      }
    };
    Softmax softmax{Score::of(params)};

    wait(&shared.k_barriers.full[k_state.stage], k_state.phase, BarrierName::kKFull);
    issue_scores(k_state.stage);
    const QueryScales& query_scales = shared.query_scales[q_state.stage];
    softmax.score.begin_tile(query_scales.q[warpgroup], shared.key_scales[k_state.stage].k);
    wgmma_wait<0>();
    pin_registers(r_s);
    arrive(&shared.k_barriers.empty[k_state.stage]);
    k_state.advance();
    softmax.admit(r_s);
    mask(r_s, n);
    softmax.begin_tile(r_s, alpha);
    softmax.template exponentiate<0, kTileN / 2>(r_s);
    pack_fp8_probabilities(r_s, r_p);

    // V's ring is one stage behind K's. With the stage a constant, all addresses are.
    const auto step = [&](auto stage) {
      constexpr int kStage = stage.value,
                    kStageV = (kStage + Traits::kStages - 1) % Traits::kStages;
      const uint32_t phase_v = kStage == 0 ? k_state.phase ^ 1 : k_state.phase;
      wait(&shared.k_barriers.full[kStage], k_state.phase, BarrierName::kKFull);
      turn.await();
      issue_scores(kStage);
      wait(&shared.v_barriers.full[kStageV], phase_v, BarrierName::kVFull);
      issue_fp8_pv<VTile>(r_o, r_p, v + kStageV * VTile::kBytes);
      turn.pass_on();

      softmax.score.begin_tile(query_scales.q[warpgroup], shared.key_scales[kStage].k);
      const float v_ratio = shared.key_scales[kStage].v_ratio;
      wgmma_wait<Traits::kSchedule.overlap ? 1 : 0>();
      pin_registers(r_s);
      arrive(&shared.k_barriers.empty[kStage]);
      softmax.admit(r_s);
      mask(r_s, n);
      bool rescale = softmax.begin_tile(r_s, alpha);
      softmax.template exponentiate<0, kHalf>(r_s);
      finish_first(softmax.row_sum[0] + softmax.row_sum[1]);  // not behind the wait

      wgmma_wait<0>();
      pin_registers(r_o);
      pin_registers(r_p);
      release(&shared.v_barriers.empty[kStageV], thread);
      if (v_ratio != 1.f) {
        alpha[0] *= v_ratio, alpha[1] *= v_ratio;
        rescale = true;
      }
      if (rescale) Softmax::scale_rows(r_o, alpha);
      softmax.template exponentiate<kHalf, kTileN / 2>(r_s);
      pack_fp8_probabilities(r_s, r_p);
    };
#pragma unroll 1
    for (--n; n >= begin; --n) {
      as_constant<Traits::kStages>(k_state.stage, step);
      k_state.advance();
    }

    const auto v_state = k_state.behind(1);
    wait(&shared.v_barriers.full[v_state.stage], v_state.phase, BarrierName::kVFull);
    issue_fp8_pv<VTile>(r_o, r_p, v + v_state.stage * VTile::kBytes);
    float inverse_sum[2], lse[2];
    softmax.finish(inverse_sum, lse);
    add_sinks(params, rows, row_in_warpgroup, inverse_sum, lse);
    inverse_sum[0] *= query_scales.out[warpgroup], inverse_sum[1] *= query_scales.out[warpgroup];
    arrive(&q_barriers.empty[q_state.stage]);
    q_state.advance();
    wgmma_wait<0>();
    pin_registers(r_o);
    release(&shared.v_barriers.empty[v_state.stage], thread);

    Softmax::scale_rows(r_o, inverse_sum);
    store_lse(params, rows, row_in_warpgroup, lse);
    store_fp8_output<Traits>(params, rows, r_o, row_in_warpgroup, thread);
  }
  turn.finish();
}

}  // namespace flash3::hopper
