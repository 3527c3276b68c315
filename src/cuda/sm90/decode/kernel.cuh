// SPDX-License-Identifier: Apache-2.0
// The decode kernel: few queries, many keys. README.md draws the schedule.
//
//   warpgroup 0   brings K and V into shared memory (load.cuh), their scales (key_scales.cuh), and
//                 the runs (work.cuh)
//   the others    products, softmax (consume.cuh, consume_fp8.cuh): a warpgroup, or two
//   other blocks  merge what these share (merge_splits.cuh)
#pragma once

#include "cuda/sm90/decode/consume.cuh"
#include "cuda/sm90/decode/consume_fp8.cuh"
#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/decode/merge_splits.cuh"
#include "cuda/sm90/device/kernel_table.hpp"

namespace flash3::cuda::sm90 {

inline constexpr int kRunWarp = 3;  // of the producers: brings the runs
static_assert(kLoaderWarps <= kScaleWarp && kScaleWarp < kRunWarp);

// The producers' warpgroup.
template <class Traits>
__device__ __forceinline__ void produce(const DecodeParams& params,
                                        typename Traits::Shared& shared) {
  if (warp_in_warpgroup() == kRunWarp)
    load_runs(params, shared.runs, {int(blockIdx.x), 1, 0});
  else if (warp_in_warpgroup() < kLoaderWarps)
    load_keys<Traits>(params, shared);
  else if constexpr (Traits::kFp8)
    load_scales<Traits>(params, shared);
}

template <class Policies>
__global__ void __launch_bounds__(Policies::Traits::kConfig.threads(),
                                  Policies::Traits::kConfig.blocks)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  using Traits = typename Policies::Traits;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  if (int(blockIdx.x) >= params.blocks) {
    merge_shares<Traits>(params, *reinterpret_cast<MergeMemory<Traits>*>(shared_bytes));
    return;
  }
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    const int producers = params.box_rows > 0 ? 1 : kLoaderThreads;
    const int loader_warps = params.box_rows > 0 ? 1 : kLoaderWarps;
    constexpr int kWarps = 4 * Traits::kConsumers;  // that consume
    shared.k_barriers.init(kWarps, producers);
    shared.v_barriers.init(kWarps, producers);
    shared.runs.barriers.init(kWarps + loader_warps + Traits::kFp8, 32);
    if constexpr (Traits::kFp8)
      for (uint64_t& full : shared.fp8.scales_full) mbarrier_init(&full, 32);
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_previous_kernel();
  constexpr DecodeConfig kConfig = Traits::kConfig;
  constexpr bool kBorrows = kConfig.borrows();
  if (warpgroup_index() > 0) {
    if constexpr (kBorrows) acquire_registers<kConfig.consumer_registers()>();
    typename Policies::Consumer consumer(params, shared);
    consumer.run();
  } else {
    if constexpr (kBorrows) release_registers<kConfig.producer_registers()>();
    produce<Traits>(params, shared);
  }
}

template <DecodeConfig kRow, Element kElement>
  requires(!kRow.latent)
struct PoliciesOf<kRow, kElement> {
  using Traits = DecodeTraits<kRow, kElement>;
  using Consumer = Choice<kRow.e4m3, Fp8DecodeConsumer<Traits>, DecodeConsumer<Traits>>;

  static const void* kernel() { return reinterpret_cast<const void*>(&decode_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
