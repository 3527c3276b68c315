// SPDX-License-Identifier: Apache-2.0
// The forward kernel: shared memory, roles, and nothing else. README.md draws the schedule.
//
//   Producer   warpgroup 0: brings Q, K and V into shared memory (load.cuh, load_fp8.cuh) and hands
//              out the work tiles
//   Consumer   warpgroups 1…: 64 query rows each, products and softmax (consume.cuh)
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/sm90/forward/consume.cuh"

namespace flash3::cuda::sm90 {

template <class Traits, class Producer, class Consumer>
__global__ void __launch_bounds__(Traits::kConfig.threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
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

// What kernels are called by: the template arguments of forward_kernel_function.
#define FLASH3_KERNEL_OF(ELEMENT, ROW)                                                          \
  Element::ELEMENT, ROW.operands, ROW.head_dim, ROW.head_dim_v, ROW.band, ROW.score, ROW.paged, \
      ROW.split, ROW.tile_m(), ROW.tile_n

// What the generated file of a row begins with (cmake/kernel_instances.cmake).
// FLASH3_KERNEL_INSTANCE of each element type follows.
#define FLASH3_KERNEL_ROW(...)                  \
  namespace flash3::cuda::sm90 {                \
  constexpr ForwardConfig kRow = {__VA_ARGS__}; \
  }

#define FLASH3_FORWARD_ROW(ELEMENT)                       \
  template <>                                             \
  struct ForwardRow<FLASH3_KERNEL_OF(ELEMENT, kRow)> {    \
    static constexpr Element kElement = Element::ELEMENT; \
    static constexpr ForwardConfig kConfig = kRow;        \
  };
