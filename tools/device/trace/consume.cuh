// SPDX-License-Identifier: Apache-2.0
// The library's consumer (cuda/sm90/forward/consume.cuh) with a stamp before each of its
// steps.
#pragma once

#include "cuda/sm90/forward/consume.cuh"
#include "device/trace/recorder.cuh"

namespace flash3::device {

using namespace cuda;
using namespace cuda::sm90;

// Base: a consumer of the library. Store: its policy.
template <class Base, class Store>
struct TracedConsumer : Base {
  using Base::k_state, Base::q_state, Base::kHoldQ, Base::previous_q_is_held;
  using typename Base::KvState, typename Base::Softmax, typename Base::Tile;

  Recorder trace;

  template <class Params, class Shared>
  __device__ __forceinline__ TracedConsumer(const Params& p, Shared& s, int w)
      : Base(p, s, w), trace(int(Role::kConsumer) + w, this->thread == 0) {}

  __device__ __forceinline__ void begin() {
    trace.note_time(0);
    trace.begin(Phase::kWaitTile);
    Base::begin();
  }
  __device__ __forceinline__ void finish() {
    Base::finish();
    trace.end();
    trace.note_time(1);
  }

  __device__ __forceinline__ KeyTileRanges find_key_tiles(const WorkTile& work) {
    trace.begin(Phase::kBeginTile);
    return Base::find_key_tiles(work);
  }

  template <class Meanwhile>
  __device__ __forceinline__ void first_key_tile(Tile& tile, const Meanwhile& meanwhile) {
    first_scores(tile, meanwhile);
    trace.begin(Phase::kMaximum, tile.n);
    this->begin_softmax(tile);
    trace.begin(Phase::kExponentiate, tile.n);
    tile.operands.make_probabilities(tile);
  }
  template <class Meanwhile>
  __device__ __forceinline__ void first_scores(Tile& tile, const Meanwhile& meanwhile) {
    trace.begin(Phase::kWaitQ);
    wait(&this->shared.q_barriers[this->warpgroup].full[q_state.stage], q_state.phase, "q_full");
    trace.begin(Phase::kWaitK, tile.n);
    wait(&this->shared.k_barriers.full[k_state.stage], k_state.phase, "k_full");
    trace.begin(Phase::kIssue, tile.n);
    this->issue_scores(tile.scores, tile.q, k_state.stage);
    trace.begin(Phase::kWaitScores, tile.n);
    if (kHoldQ && previous_q_is_held) this->release_q(1 - q_state.stage);
    meanwhile();
    tile.operands.begin_key_tile(tile, k_state, k_state);
    wgmma_wait<0>();
    fence_operand(tile.scores);
    release(&this->shared.k_barriers.empty[k_state.stage], this->thread);
    k_state.advance();
  }

  __device__ __forceinline__ void issue_products(Tile& tile, int stage) {
    trace.begin(Phase::kWaitK, tile.n);
    wait(&this->shared.k_barriers.full[stage], k_state.phase, "k_full");
    trace.begin(Phase::kWaitTurn, tile.n);
    this->ping_pong.wait();
    trace.begin(Phase::kIssue, tile.n);
    this->issue_scores(tile.scores, tile.q, stage);
    this->issue_output(tile, this->v_state_at(stage));
  }

  __device__ __forceinline__ void run_softmax(Tile& tile, int stage) {
    trace.begin(Phase::kWaitScores, tile.n);
    this->wait_for_scores(tile, stage);
    trace.begin(Phase::kMaximum, tile.n);
    const bool raised = this->find_maxima(tile);
    trace.begin(Phase::kWaitOutput, tile.n);
    this->wait_for_output(tile, this->v_stage_at(stage));
    trace.begin(Phase::kExponentiate, tile.n);
    this->finish_softmax(tile, raised, stage);
  }

  // As in Base.
  __device__ __forceinline__ void finish_output(Tile& tile, float (&inverse_sum)[2],
                                                float (&lse)[2]) {
    const KvState v_state = k_state.behind(1);
    trace.begin(Phase::kLastProduct);
    this->issue_output(tile, v_state);
    tile.softmax.finish(inverse_sum, lse);
    add_sinks(this->params, this->output(), this->row, inverse_sum, lse);
    store_rows(this->params, this->output(), this->row, tile.softmax, lse);
    tile.operands.scale_normalisation(inverse_sum, v_state);
    if constexpr (!Store::kInPlaceOfQ) {
      this->release_q(q_state.stage);
      q_state.advance();
    }
    wgmma_wait<0>();
    fence_operand(tile.output);
    release(&this->shared.v_barriers.empty[v_state.stage], this->thread);
    trace.begin(Phase::kStore);
    tile.operands.complete_output(tile);
    this->skip_masked_tiles(tile.keys.seen.begin - tile.keys.loaded.begin);

    Softmax::scale_rows(tile.output, inverse_sum);
    Store::store(this->params, this->output(), this->shared.q[q_state.stage][this->warpgroup],
                 tile.output, this->warpgroup, this->thread);
    if constexpr (Store::kInPlaceOfQ) {
      if (!kHoldQ) this->release_q(q_state.stage);
      previous_q_is_held = kHoldQ;
      q_state.advance();
    }
    trace.begin(Phase::kWaitTile);
  }
};

}  // namespace flash3::device
