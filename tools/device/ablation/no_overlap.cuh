// SPDX-License-Identifier: Apache-2.0
// A consumer whose softmax runs beside none of its own products.
#pragma once

#include "device/ablation/instance.cuh"

namespace flash3::device {

// Base: a consumer of the library.
template <class Base>
struct NoOverlapConsumer : Base {
  using Base::Base;
  using typename Base::Tile;

  // O of the key tile before this one to its end, and then S of this one.
  __device__ __forceinline__ void issue_products(Tile& tile, int stage) {
    this->ping_pong.wait();
    this->issue_output(tile, this->v_state_at(stage));
    this->wait_for_output(tile, this->v_stage_at(stage));
    wait(&this->shared.k_barriers.full[stage], this->k_state.phase, "k_full");
    this->issue_scores(tile.scores, tile.q, stage);
  }

  __device__ __forceinline__ void run_softmax(Tile& tile, int stage) {
    tile.operands.begin_key_tile(tile, {stage, this->k_state.phase}, this->v_state_at(stage));
    this->ping_pong.arrive();
    wgmma_wait<0>();
    fence_operand(tile.scores);
    release(&this->shared.k_barriers.empty[stage], this->thread);
    const bool raised = this->begin_softmax(tile);
    this->finish_softmax(tile, raised, stage);
  }
};

}  // namespace flash3::device
