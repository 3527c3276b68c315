// SPDX-License-Identifier: Apache-2.0
// Who does what in a block of the backward kernels, and the hardware barriers among them. Warpgroup
// 0 produces, the others consume.
#pragma once

#include "hopper/device/barriers.cuh"

namespace flash3::hopper {

// A loader brings what goes with its name too: K and the LSE, V and delta. From kAddDq on there is
// a warp for each consumer warpgroup.
enum class BackwardProducerWarp : int { kLoadQ = 0, kLoadDout = 1, kAddDq = 2 };

enum class BackwardBarrier : int {
  kOutputStaged = 1,  // one id for each warpgroup: its tile is in shared memory, or its readers are
                      // done with what was there
  kScoreGradient =
      kOutputStaged + kMaxConsumerWarpgroups,  // dS of all warpgroups is in shared memory
  kOwnKeysRead                                 // no consumer reads the block's K and V any more
};

}  // namespace flash3::hopper
