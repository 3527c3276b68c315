// SPDX-License-Identifier: Apache-2.0
// The forward kernel: shared memory, roles, and nothing else. README.md draws the schedule.
//
//   Producer   warpgroup 0: brings Q, K and V into shared memory (load.cuh, load_fp8.cuh) and hands
//              out the work tiles
//   Consumer   warpgroups 1…: 64 query rows each, products and softmax (consume.cuh)
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/sm90/device/kernel_table.hpp"
#include "cuda/sm90/forward/consume.cuh"

namespace flash3::cuda::sm90 {

// Policies: the types Traits, Producer and Consumer (policies.cuh), as PoliciesOf has them.
template <class Policies>
__global__ void __launch_bounds__(Policies::Traits::kConfig.threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using Traits = typename Policies::Traits;
  using Producer = typename Policies::Producer;
  using Consumer = typename Policies::Consumer;
  static_assert(ProducerFor<Producer, Traits>);
  static_assert(ConsumerFor<Consumer, Traits>);
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);

  if (threadIdx.x == 0) {
    Producer::init_barriers(shared);
    mbarrier_init(&shared.v_loaded, 1);
    shared.tiles.init(Producer::kTileReaders + kWarpgroupThreads * Traits::kWarpgroups);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    release_registers<Traits::kConfig.producer_registers()>();
    Producer::run(params, shared);
  } else {
    acquire_registers<Traits::kConfig.consumer_registers()>();
    Consumer consumer(params, shared, warpgroup - 1);
    consume(consumer);
  }
}

}  // namespace flash3::cuda::sm90
