// The consumer: one warpgroup, 64 query rows. Per key tile j, in the order of issue
//
//   S_j = Q·K_jᵀ            asynchronous
//   O  += P_{j−1}·V_{j−1}   asynchronous: runs under the softmax of S_j (two-stage overlap inside a
//   warpgroup) wait S_j; mask; P_j, α = online softmax wait O; O ·= α
//
// and the warpgroups take turns to issue (ping-pong): one's softmax runs under the other's GEMMs.
// FlashAttention-3, §3.1–3.2.
#pragma once

#include "hopper/device/band_mask.cuh"
#include "hopper/device/online_softmax.cuh"
#include "hopper/forward/kernel.cuh"
#include "hopper/forward/store.cuh"

namespace flash3::hopper {

// Ping-pong: warpgroup w issues its GEMMs after warpgroup w − 1 has, round robin.
template <int kWarpgroups>
struct GemmTurn {
  int warpgroup;

  // The last one hands the first turn out.
  __device__ __forceinline__ void start() const {
    if (warpgroup == kWarpgroups - 1) pass_on();
  }
  __device__ __forceinline__ void await() const {
    sync(NamedBarrier::kGemmTurn, warpgroup, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_on() const {
    const int next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
    arrive(NamedBarrier::kGemmTurn, next, 2 * kWarpgroupThreads);
  }
  // Takes the turn that is left over, so that no barrier is left half full.
  __device__ __forceinline__ void finish() const {
    if (warpgroup == 0) await();
  }
};

// A warp's arrival that it has read a stage.
__device__ __forceinline__ void release(uint64_t* empty) {
  if (threadIdx.x % 32 == 0) arrive(empty);
}

template <class Traits>
__device__ __forceinline__ void consume(const ForwardParams& params,
                                        typename Traits::Shared& shared, int warpgroup) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  constexpr Element kElement = Traits::kElement;
  constexpr int kTileN = Traits::kTileN;

  TileReader tiles{shared.tiles, true};
  const GemmTurn<Traits::kWarpgroups> turn{warpgroup};
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int row_in_warpgroup = thread / 32 * 16 + thread % 32 / 4;
  const int key_in_tile = thread % 4 * 2;
  const uint32_t s_q = uint32_t(__cvta_generic_to_shared(shared.q[warpgroup]));
  const uint32_t s_k = uint32_t(__cvta_generic_to_shared(shared.k));
  const uint32_t s_v = uint32_t(__cvta_generic_to_shared(shared.v));
  typename Traits::KvState k_state, v_state;
  uint32_t q_phase = 0;

  turn.start();
  WorkTile work;
  while (tiles.next(work)) {
    const int first_row = work.query + warpgroup * kWarpgroupRows;
    const OutputRows rows{first_row, work.head, work.batch};
    if (!work.has_keys()) {
      store_empty<Traits>(params, rows, thread);
      continue;
    }

    // Key tiles that need no mask for these 64 rows.
    const Range unmasked =
        (Traits::kBand ? params.band : Band{})
            .full_tiles({first_row, first_row + kWarpgroupRows}, params.seq_k, kTileN);
    const auto mask = [&](float(&r_s)[kTileN / 2], int n) {
      if (n < unmasked.begin || n >= unmasked.end) {
        mask_scores<Traits::kBand>(r_s, params.band, first_row + row_in_warpgroup,
                                   n * kTileN + key_in_tile, params.seq_k);
      }
    };

    float r_s[kTileN / 2];
    uint32_t r_p[kTileN / 4];
    float r_o[VTile::kCols / 2] = {};
    float alpha[2];
    OnlineSoftmax softmax{params.scale_log2};

    int n = work.key_tile_end - 1;
    wait(&shared.q_barriers.full[warpgroup], q_phase, BarrierName::kQFull);
    q_phase ^= 1;
    wait(&shared.k_barriers.full[k_state.stage], k_state.phase, BarrierName::kKFull);
    issue_qk<kElement, typename Traits::QTile, KTile>(r_s, s_q,
                                                      s_k + k_state.stage * KTile::kBytes);
    wgmma_wait<0>();
    pin_registers(r_s);
    release(&shared.k_barriers.empty[k_state.stage]);
    k_state.advance();
    mask(r_s, n);
    softmax.update(r_s, alpha);
    pack_probabilities<kElement>(r_s, r_p);

#pragma unroll 1
    for (--n; n >= work.key_tile_begin; --n) {
      wait(&shared.k_barriers.full[k_state.stage], k_state.phase, BarrierName::kKFull);
      turn.await();
      issue_qk<kElement, typename Traits::QTile, KTile>(r_s, s_q,
                                                        s_k + k_state.stage * KTile::kBytes);
      wait(&shared.v_barriers.full[v_state.stage], v_state.phase, BarrierName::kVFull);
      issue_pv<kElement, VTile>(r_o, r_p, s_v + v_state.stage * VTile::kBytes);
      turn.pass_on();

      wgmma_wait<1>();
      pin_registers(r_s);
      release(&shared.k_barriers.empty[k_state.stage]);
      k_state.advance();
      mask(r_s, n);
      softmax.update(r_s, alpha);

      wgmma_wait<0>();
      pin_registers(r_o);
      pin_registers(r_p);
      release(&shared.v_barriers.empty[v_state.stage]);
      v_state.advance();
      pack_probabilities<kElement>(r_s, r_p);
      OnlineSoftmax::scale_rows(r_o, alpha);
    }

    wait(&shared.v_barriers.full[v_state.stage], v_state.phase, BarrierName::kVFull);
    issue_pv<kElement, VTile>(r_o, r_p, s_v + v_state.stage * VTile::kBytes);
    float inverse_sum[2], lse[2];
    softmax.finish(params.softmax_scale, inverse_sum, lse);
    wgmma_wait<0>();
    pin_registers(r_o);
    release(&shared.v_barriers.empty[v_state.stage]);
    v_state.advance();

    OnlineSoftmax::scale_rows(r_o, inverse_sum);
    store_lse(params, rows, row_in_warpgroup, lse);
    store_output<Traits>(params, rows, shared.q[warpgroup], r_o, warpgroup, thread);
    if (thread == 0) arrive(&shared.q_barriers.empty[warpgroup]);
  }
  turn.finish();
}

}  // namespace flash3::hopper
