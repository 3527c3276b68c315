// SPDX-License-Identifier: Apache-2.0
// Kernels that go without a part of the library's: the two-stage overlap, the ping-pong barrier,
// the lazy maximum.
#pragma once

#include "device/ablation/instance.cuh"

namespace flash3::device {

// A consumer whose softmax runs beside none of its own products. Base: a consumer of the library.
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

// Warpgroups that issue their products without regard to each other.

// In the place of PingPongBarrier: each warpgroup arrives at its own barrier, so that none waits
// and ptxas sees the same code. (With nothing in its place it spills in the FP8 kernel.)
struct NoPingPong {
  int warpgroup;

  __device__ __forceinline__ void start() const { arrive(); }
  __device__ __forceinline__ void wait() const {
    sync(ForwardBarrier::kPingPong, warpgroup, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void arrive() const {
    cuda::sm90::arrive(ForwardBarrier::kPingPong, warpgroup, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void finish() const { wait(); }
};

template <class Traits>
struct WithoutPingPong : Traits {
  using PingPong = NoPingPong;
};

// FP8 scores whose maximum follows every one of them. Without slack, what it took from the range of
// e4m3 goes to the offset.

struct EagerFp8Score : Fp8Score<ScoreKind::kPlain> {
  static constexpr float kOffset = 8.f;

  template <class Params>
  static __device__ __forceinline__ EagerFp8Score of(const Params&) {
    return {};
  }
  __device__ __forceinline__ float limit(float m) const { return m; }
  __device__ __forceinline__ float shift_of(float m) const { return m - kOffset; }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return m - kOffset - shift;
  }
};

template <class Traits>
struct EagerOperandsFp8 : OperandsFp8<Traits> {
  using Score = EagerFp8Score;
  using OperandsFp8<Traits>::OperandsFp8;
};

}  // namespace flash3::device
