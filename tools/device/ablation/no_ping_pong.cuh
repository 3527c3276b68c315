// SPDX-License-Identifier: Apache-2.0
// Warpgroups that issue their products without regard to each other.
#pragma once

#include "device/ablation/instance.cuh"

namespace flash3::device {

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

}  // namespace flash3::device
