// SPDX-License-Identifier: Apache-2.0
// The backward kernel: what a block sets up before its warpgroups take their roles. README.md draws
// the schedule.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/sm90/backward/walk.cuh"

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

template <class Policies>
__global__ void __launch_bounds__(Policies::Traits::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ typename Policies::Traits::Params params) {
  using Traits = typename Policies::Traits;
  using Roles = typename Policies::Roles;
  static_assert(RolesFor<Roles, Traits>);
  static_assert(sizeof(typename Traits::Shared) == shared_memory_bytes(Traits::kConfig));
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
      Roles::accumulate_dq(params, shared, work);
    }
  } else if (warpgroup == Traits::kConfig.producer_warpgroup()) {
    release_registers<Traits::kConfig.producer_registers()>();
    Roles::produce(params, shared, work);
  } else {
    acquire_registers<Traits::kConfig.consumer_registers()>();
    Roles::consume(params, shared, work, warpgroup - 1);
  }
}

// What the kernel of a row and an element type is put together from (device/kernel_table.hpp).
template <auto kRow, Element kElement>
struct PoliciesOf;

// consume.cuh or consume_wide.cuh has the roles of a row, and softcap.cuh what its scores become
// under a softcap.
template <BackwardConfig kRow, Element kElement>
struct PoliciesOf<kRow, kElement> {
  using Traits = BackwardTraits<kRow, kElement>;
  using Roles = sm90::Roles<Traits>;

  static const void* kernel() {
    return reinterpret_cast<const void*>(&backward_kernel<PoliciesOf>);
  }
};

}  // namespace flash3::cuda::sm90
