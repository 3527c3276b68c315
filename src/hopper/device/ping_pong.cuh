// SPDX-License-Identifier: Apache-2.0
// Ping-pong between the consumer warpgroups (FlashAttention-3, §3.1): warpgroup w issues its GEMMs
// after warpgroup w − 1 has, round robin, so that one's softmax runs under the other's GEMMs.
#pragma once

#include "hopper/device/barriers.cuh"
#include "hopper/device/warps.cuh"

namespace flash3::hopper {

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
    hopper::arrive(kFirst, next, 2 * kWarpgroupThreads);
  }
  // Takes the arrival that is left over, so that no barrier stays half full.
  __device__ __forceinline__ void finish() const {
    if (warpgroup == 0) wait();
  }
};

}  // namespace flash3::hopper
