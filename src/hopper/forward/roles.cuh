// SPDX-License-Identifier: Apache-2.0
// Who does what in a block of the forward kernels, and the hardware barriers among them. Warpgroup
// 0 produces: one thread of each of its warps drives one stream of TMA loads, or hands out the work
// tiles. Warpgroups 1… consume: 64 query rows each, GEMMs and softmax.
#pragma once

#include "hopper/device/barriers.cuh"

namespace flash3::hopper {

enum class ProducerWarp : int { kLoadQ = 0, kLoadK = 1, kLoadV = 2, kSchedule = 3 };

// FP8: one thread loads everything, and two warps transpose V.
enum class Fp8ProducerWarp : int { kLoad = 0, kSchedule = 1, kTranspose = 2 };
inline constexpr int kTransposeThreads = 64;

// One id for each consumer warpgroup.
enum class ForwardBarrier : int {
  kPingPong = 1,                                      // this warpgroup may issue its GEMMs
  kOutputStaged = kPingPong + kMaxConsumerWarpgroups  // its output tile is in shared memory, or its
                                                      // readers are done with what was there
};

}  // namespace flash3::hopper
