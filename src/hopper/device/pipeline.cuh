// SPDX-License-Identifier: Apache-2.0
// A circular buffer of shared-memory stages between a producer and the consumers.
//
// stage s cycles: empty → (producer: expect bytes, TMA) → full → (consumers: read, arrive) → empty
// … Each side walks with its own PipelineState; the parity that it waits for flips each time round.
#pragma once

#include "hopper/device/barriers.cuh"

namespace flash3::hopper {

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
      cuda::ptx::mbarrier_init(&full[s], producer_arrivals);
      cuda::ptx::mbarrier_init(&empty[s], consumer_arrivals);
    }
  }
};

}  // namespace flash3::hopper
