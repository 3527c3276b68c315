// SPDX-License-Identifier: Apache-2.0
// What keeps warpgroups in step: rings between a producer and the consumers, and ping-pong among
// the consumers.
//
// A ring is a circular buffer of shared-memory stages:
//
// stage s cycles: empty → (producer: expect bytes, TMA) → full → (consumers: read, arrive) → empty
// … Each side walks with its own PipelineState; the parity that it waits for flips each time round.
#pragma once

#include "cuda/device/warps.cuh"
#include "cuda/sm90/device/barriers.cuh"

namespace flash3::cuda::sm90 {

template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  // The state at the step-th use of the buffer, counted from 0.
  static __device__ __forceinline__ PipelineState at(int step) {
    return {step % kStages, uint32_t(step / kStages % 2)};
  }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // Where this was n ≤ kStages steps ago.
  __device__ __forceinline__ PipelineState behind(int n) const {
    return stage >= n ? PipelineState{stage - n, phase}
                      : PipelineState{stage - n + kStages, phase ^ 1};
  }
};

// The barriers of one ring, in shared memory.
template <int kStages>
struct RingBarriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  __device__ void init(int consumer_arrivals, int producer_arrivals = 1) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&full[s], producer_arrivals);
      mbarrier_init(&empty[s], consumer_arrivals);
    }
  }
};

// Ping-pong between the consumer warpgroups (FlashAttention-3, §3.1): warpgroup w issues its GEMMs
// after warpgroup w − 1 has, round robin, so that one's softmax runs under the other's GEMMs.
// kFirst: the hardware barrier of warpgroup 0.
template <int kWarpgroups, auto kFirst>
struct PingPongBarrier {
  int warpgroup;

  // The last warpgroup lets the first one begin.
  __device__ __forceinline__ void start() const {
    if (warpgroup == kWarpgroups - 1) arrive();
  }
  // Waits until this warpgroup may issue.
  __device__ __forceinline__ void wait() const { sync(kFirst, warpgroup, 2 * kWarpgroupThreads); }
  // Lets the next warpgroup issue.
  __device__ __forceinline__ void arrive() const {
    const int next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
    sm90::arrive(kFirst, next, 2 * kWarpgroupThreads);
  }
  // Takes the arrival that is left over, so that no barrier stays half full.
  __device__ __forceinline__ void finish() const {
    if (warpgroup == 0) wait();
  }
};

}  // namespace flash3::cuda::sm90
