// SPDX-License-Identifier: Apache-2.0
// The backward kernel: what a block sets up before its warpgroups take their roles. README.md draws
// the schedule.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/sm90/backward/find_work.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
__device__ __forceinline__ void init_barriers(typename Traits::Shared& shared) {
  shared.q_barriers.init(kConsumerThreads);
  shared.dout_barriers.init(kConsumerThreads);
  shared.k_barriers.init(kConsumerThreads);
  shared.work_barriers.init(kKeyTileReaders);
  shared.p_barriers.init(kWarpgroupThreads, kWarpgroupThreads);
  shared.ds_barriers.init(kWarpgroupThreads, kWarpgroupThreads);
  mbarrier_init(&shared.v_full, 1);
  mbarrier_init(&shared.v_empty, kConsumerThreads);
  mbarrier_init(&shared.k_loaded, 1);
  mbarrier_init(&shared.v_loaded, 1);
  mbarrier_init(&shared.own_keys_read, kConsumerThreads);
  if constexpr (Traits::kConfig.wide) {
    mbarrier_init(&shared.dq_ready, 2);  // both threads of the semaphores
    mbarrier_init(&shared.dq_added, kWarpgroupThreads);
  }
  for (int w = 0; w < kConsumerWarpgroups; ++w) {
    mbarrier_init(&shared.dq_full[w], kWarpgroupThreads);
    mbarrier_init(&shared.dq_empty[w], 1);
  }
  fence_mbarrier_init();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);

  launch_dependents();
  if (threadIdx.x == 0) init_barriers<Traits>(shared);
  wait_for_previous_kernel();
  if (!Traits::kPersistent && threadIdx.x / 32 == 1) find_work<Traits>(params, 0, shared.work[0]);
  __syncthreads();

  const KeyTile& work = shared.work[0];
  if (!Traits::kPersistent && !work.valid) return;
  const int warpgroup = warpgroup_index();
  if (Traits::kConfig.wide && warpgroup == 0) {
    if constexpr (Traits::kConfig.wide) {
      release_registers<Traits::kConfig.dq_registers()>();
      Roles<Traits>::accumulate_dq(params, shared, work);
    }
  } else if (warpgroup == Traits::kConfig.producer_warpgroup()) {
    release_registers<Traits::kConfig.producer_registers()>();
    Roles<Traits>::produce(params, shared, work);
  } else {
    acquire_registers<Traits::kConfig.consumer_registers()>();
    Roles<Traits>::consume(params, shared, work, warpgroup - 1);
  }
}

}  // namespace flash3::cuda::sm90

// What a row's kernel is called by.
#define FLASH3_KERNEL_OF(ROW) \
  ROW.head_dim, ROW.head_dim_v, ROW.band, ROW.score, ROW.tile_m, ROW.tile_n

// The lines of a generated file (cmake/kernel_instances.cmake), behind instance.cuh or
// instance_wide.cuh: the row, and each of its element types.
#define FLASH3_KERNEL_ROW(...)                      \
  namespace flash3::cuda::sm90 {                    \
  constexpr BackwardConfig kRow = {__VA_ARGS__};    \
  template <>                                       \
  struct BackwardRow<FLASH3_KERNEL_OF(kRow)> {      \
    static constexpr BackwardConfig kConfig = kRow; \
  };                                                \
  }

#define FLASH3_KERNEL_INSTANCE(ELEMENT)                                              \
  namespace flash3::cuda::sm90 {                                                     \
  template <>                                                                        \
  const void* backward_kernel_function<Element::ELEMENT, FLASH3_KERNEL_OF(kRow)>() { \
    using Traits = BackwardTraits<Element::ELEMENT, FLASH3_KERNEL_OF(kRow)>;         \
    return reinterpret_cast<const void*>(&backward_kernel<Traits>);                  \
  }                                                                                  \
  }
