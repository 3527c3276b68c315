// SPDX-License-Identifier: Apache-2.0
// Turns of the consumer warpgroups to issue their products (FlashAttention-3, §3.1).
#pragma once

#include "hopper/device/barriers.cuh"
#include "hopper/device/roles.cuh"

namespace flash3::hopper {

// Ping-pong: warpgroup w issues its GEMMs after warpgroup w − 1 has, round robin. Without, each
// passes the turn on to itself: nobody waits, and ptxas sees the same code. (With nothing in the
// turns' place it spills in the FP8 kernel.)
template <int kWarpgroups, bool kPingPong>
struct GemmTurn {
  int warpgroup;

  // The last one hands the first turn out.
  __device__ __forceinline__ void start() const {
    if (!kPingPong || warpgroup == kWarpgroups - 1) pass_on();
  }
  __device__ __forceinline__ void await() const {
    sync(NamedBarrier::kGemmTurn, warpgroup, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_on() const {
    const int next = !kPingPong ? warpgroup : warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
    arrive(NamedBarrier::kGemmTurn, next, 2 * kWarpgroupThreads);
  }
  // Takes the turn that is left over, so that no barrier is left half full.
  __device__ __forceinline__ void finish() const {
    if (!kPingPong || warpgroup == 0) await();
  }
};

}  // namespace flash3::hopper
