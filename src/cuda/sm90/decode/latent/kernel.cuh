// SPDX-License-Identifier: Apache-2.0
// The latent kernel: decoding and short prompts of multi-head latent attention (MLA). 64 query
// rows, queries × heads, against all keys of a sequence. README.md tells of the decode kernels,
// whose schedule and producers it has.
//
//   warpgroup 0      brings rope and latent parts of the keys (load.cuh), and the runs (work.cuh)
//   warpgroups 1, 2  products and softmax (consume.cuh)
#pragma once

#include "cuda/sm90/decode/latent/consume.cuh"
#include "cuda/sm90/decode/latent/load.cuh"
#include "cuda/sm90/device/kernel_table.hpp"

namespace flash3::cuda::sm90 {

template <class Policies>
__global__ void __launch_bounds__(Policies::Traits::kConfig.threads(), 1)
    latent_kernel(const __grid_constant__ DecodeParams params) {
  using Traits = typename Policies::Traits;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  constexpr int kConsumerWarps = 4 * Traits::kWarpgroups, kRunWarp = 3;
  if (threadIdx.x == 0) {
    const int producers = params.box_rows > 0 ? 1 : kLoaderThreads;
    const int loader_warps = params.box_rows > 0 ? 1 : kLoaderWarps;
    for (int s = 0; s < Traits::kStages; ++s) {
      mbarrier_init(&shared.k_full[s], producers);
      for (uint64_t& full : shared.v_full[s]) mbarrier_init(&full, producers);
      mbarrier_init(&shared.empty[s], kConsumerWarps);
      mbarrier_init(&shared.p_full[s], 4);
    }
    shared.runs.barriers.init(kConsumerWarps + loader_warps, 32);
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_previous_kernel();
  constexpr DecodeConfig kConfig = Traits::kConfig;
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    release_registers<kConfig.producer_registers()>();
    if (warp_in_warpgroup() == kRunWarp)
      load_runs(
          params, shared.runs,
          {int(blockIdx.x) / params.cluster, params.cluster, int(blockIdx.x) % params.cluster});
    else if (warp_in_warpgroup() < kLoaderWarps)
      load_latent_keys<Traits>(params, shared);
  } else {
    acquire_registers<kConfig.consumer_registers()>();
    LatentConsumer<Traits>(params, shared, warpgroup - 1).run();
  }
}

template <DecodeConfig kRow, Element kElement>
  requires(kRow.latent)
struct PoliciesOf<kRow, kElement> {
  using Traits = LatentTraits<kRow, kElement>;

  static const void* kernel() { return reinterpret_cast<const void*>(&latent_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
