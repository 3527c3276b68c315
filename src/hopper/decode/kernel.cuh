// SPDX-License-Identifier: Apache-2.0
// The decode kernel: few queries, many keys. README.md draws the schedule.
//
//   warpgroup 0   brings K and V into shared memory (load.cuh), and the runs (work.cuh)
//   warpgroup 1   products, softmax (consume.cuh)
//   all           merging of what blocks share (share.cuh)
#pragma once

#include "hopper/decode/consume.cuh"
#include "hopper/decode/load.cuh"

namespace flash3::hopper {

inline constexpr int kRunWarp = 3;  // of the producers: brings the runs
static_assert(kLoaderWarps <= kRunWarp);

template <class Traits>
__global__ void __launch_bounds__(Traits::kConfig.threads(), 1)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    const int producers = params.box_rows > 0 ? 1 : kLoaderThreads;
    const int loader_warps = params.box_rows > 0 ? 1 : kLoaderWarps;
    shared.k_barriers.init(4, producers);  // each consumer warp
    shared.v_barriers.init(4, producers);
    shared.runs.barriers.init(4 + loader_warps, 32);
    mbarrier_init(&shared.runs.ended, 32 + kWarpgroupThreads);
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_previous_kernel();
  if (warpgroup_index() == 1)
    DecodeConsumer<Traits>(params, shared).run();
  else if (warp_in_warpgroup() == kRunWarp)
    load_runs(params, shared.runs);
  else if (warp_in_warpgroup() < kLoaderWarps)
    load_keys<Traits>(params, shared);
  // Behind all that other blocks may wait for: who looked for parts before would be in the way.
  wait(&shared.runs.ended, 0, "runs_ended");
  if (shared.runs.merged.exists) merge_parts<Traits>(params, shared.runs.merged, shared.runs.lists);
}

}  // namespace flash3::hopper
