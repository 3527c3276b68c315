// SPDX-License-Identifier: Apache-2.0
// Waiting, and what keeps warpgroups in step: mbarriers in shared memory (producers and consumers)
// and the hardware's named barriers (among consumers); rings between a producer and the consumers.
// In a build with FLASH3_DEBUG_BARRIERS a wait that lasts seconds prints the barrier's name and
// traps. A stage of a ring, in shared memory, is by turns
//
//   empty → (producer: expect bytes, TMA) → full → (consumers: read, arrive) → empty → …
//
// Each side walks with its own PipelineState; the parity that it waits for flips each time round.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/device/ptx/sync.cuh"

#if defined(FLASH3_DEBUG_BARRIERS)
#include <cstdio>
#endif

namespace flash3::cuda::sm90 {

using cuda::arrive;

// Calls done() until it is true. name: of the barrier, by what has happened when it completes.
template <class Done>
__device__ __forceinline__ void wait_until(const Done& done, [[maybe_unused]] const char* name,
                                           [[maybe_unused]] int value) {
#if defined(FLASH3_DEBUG_BARRIERS)
  constexpr long long kTimeoutClocks = 4'000'000'000;  // about two seconds
  const long long start = clock64();
  while (!done()) {
    if (clock64() - start > kTimeoutClocks) {
      printf("flash3: stuck on barrier %s: block %d, warp %d, lane %d, parity %d\n", name,
             int(blockIdx.x), int(threadIdx.x / 32), int(threadIdx.x % 32), value);
      __trap();
    }
  }
#else
  while (!done()) {
  }
#endif
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity, const char* name) {
  wait_until([&] { return mbarrier_try_wait_parity(barrier, parity); }, name, int(parity));
}

// A warp's arrival that it has read a stage.
__device__ __forceinline__ void release(uint64_t* empty, int thread) {
  if (thread % 32 == 0) arrive(empty);
}

// The hardware's barriers. Each kernel family numbers its own in an enumeration; those with one for
// each warpgroup own as many ids in a row as there can be warpgroups.
inline constexpr int kMaxConsumerWarpgroups = 4;

template <class NamedBarrier>
__device__ __forceinline__ void sync(NamedBarrier barrier, int warpgroup, int threads) {
  named_barrier_sync(int(barrier) + warpgroup, threads);
}

template <class NamedBarrier>
__device__ __forceinline__ void arrive(NamedBarrier barrier, int warpgroup, int threads) {
  named_barrier_arrive(int(barrier) + warpgroup, threads);
}

// ---- rings ----

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

}  // namespace flash3::cuda::sm90
