// SPDX-License-Identifier: Apache-2.0
// The third stage that the paper describes (FlashAttention-3, §3.2): two tiles of scores.
//
//   S_{j+1} = Q·K_{j+1}ᵀ     asynchronous
//   O += P_{j−1}·V_{j−1}     asynchronous
//   P_j = online softmax of S_j, under both
//   wait both; O ·= α_j
#pragma once

#include "device/ablation/instance.cuh"

namespace flash3::device {

// Base: a 16-bit consumer of the library.
template <class Base>
struct ThreeStageConsumer : Base {
  using Base::Base, Base::k_state, Base::kTileN;
  using typename Base::KTile, typename Base::KvState, typename Base::Softmax, typename Base::Tile;
  static_assert(Base::kStages == 2);

  // The scores that the tensor cores write; the softmax works on tile.scores, a copy of them: ptxas
  // gives all products of one shape the same registers.
  using Next = float[kTileN / 2];

  template <class Meanwhile>
  __device__ __forceinline__ void first_key_tile(Tile& tile, const Meanwhile& meanwhile) {
    Next next;
    wait(&this->shared.q_barriers[this->warpgroup].full[this->q_state.stage], this->q_state.phase,
         "q_full");
    issue_scores(tile, next, k_state.stage);
    if (Base::kHoldQ && this->previous_q_is_held) this->release_q(1 - this->q_state.stage);
    meanwhile();
    wgmma_wait<0>();
    take_scores(tile, next, k_state.stage);
    k_state.advance();
    exponentiate(tile);
    pack_probabilities<Element::kFloat16>(tile.scores, tile.probabilities);
  }

  __device__ __forceinline__ void issue_scores(Tile& tile, Next& next, int stage) {
    wait(&this->shared.k_barriers.full[stage], k_state.phase, "k_full");
    Base::issue_scores(next, tile.q, stage);
  }
  __device__ __forceinline__ void take_scores(Tile& tile, Next& next, int stage) {
    fence_operand(next);
    release(&this->shared.k_barriers.empty[stage], this->thread);
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) tile.scores[i] = next[i];
  }

  // True if O must be rescaled.
  __device__ __forceinline__ bool exponentiate(Tile& tile) {
    const bool raised = this->begin_softmax(tile);
    tile.softmax.exponentiate(tile.view(), tile.scores);
    order_before(tile.softmax.row_sum[0] + tile.softmax.row_sum[1]);  // not after the next wait
    return raised;
  }
  // The softmax under the products of this stage of K and V.
  __device__ __forceinline__ void run_softmax(Tile& tile, int stage) {
    const bool raised = exponentiate(tile);
    this->wait_for_output(tile, stage);
    if (raised) Softmax::scale_rows(tile.output, tile.alpha);
    pack_probabilities<Element::kFloat16>(tile.scores, tile.probabilities);
  }

  // V is two tiles behind K.
  __device__ __forceinline__ KvState v_state_at(int stage) const {
    return {stage, k_state.phase ^ 1};
  }
};

template <class Base>
__device__ __forceinline__ void run_key_tiles(ThreeStageConsumer<Base>& c,
                                              typename Base::Tile& tile) {
  if (tile.n <= tile.keys.seen.begin) return;
  typename ThreeStageConsumer<Base>::Next next;
  c.issue_scores(tile, next, c.k_state.stage);
  wgmma_wait<0>();
  c.take_scores(tile, next, c.k_state.stage);
  c.k_state.advance();
#pragma unroll 1
  for (--tile.n; tile.n > tile.keys.seen.begin; --tile.n) {
    as_constant<2>(c.k_state.stage, [&](auto stage) {
      c.ping_pong.wait();
      c.issue_scores(tile, next, stage.value);
      c.issue_output(tile, c.v_state_at(stage.value));
      c.ping_pong.arrive();
      c.run_softmax(tile, stage.value);
      c.take_scores(tile, next, stage.value);
    });
    c.k_state.advance();
  }
  c.issue_output(tile, c.v_state_at(c.k_state.stage));
  c.run_softmax(tile, c.k_state.stage);
}

}  // namespace flash3::device
