// Turns of the consumer warpgroups to issue their products (FlashAttention-3, §3.1).
#pragma once

#include "hopper/device/barriers.cuh"
#include "hopper/device/roles.cuh"

namespace flash3::hopper {

// Ping-pong: warpgroup w issues its GEMMs after warpgroup w − 1 has, round robin.
// Without ping-pong nobody waits.
template <int kWarpgroups, bool kPingPong>
struct GemmTurn {
  int warpgroup;

  // The last one hands the first turn out.
  __device__ __forceinline__ void start() const {
    if (warpgroup == kWarpgroups - 1) pass_on();
  }
  __device__ __forceinline__ void await() const {
    if constexpr (kPingPong) sync(NamedBarrier::kGemmTurn, warpgroup, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_on() const {
    const int next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
    if constexpr (kPingPong) arrive(NamedBarrier::kGemmTurn, next, 2 * kWarpgroupThreads);
  }
  // Takes the turn that is left over, so that no barrier is left half full.
  __device__ __forceinline__ void finish() const {
    if (warpgroup == 0) await();
  }
};

}  // namespace flash3::hopper
