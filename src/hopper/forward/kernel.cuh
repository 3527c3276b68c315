// SPDX-License-Identifier: Apache-2.0
// The forward kernel: shared memory, roles, and nothing else. load.cuh is the producer, math.cuh
// the consumer, store.cuh the consumer's epilogue; README.md draws the schedule.
#pragma once

#include "hopper/device/pipeline.cuh"
#include "hopper/device/ptx/registers.cuh"
#include "hopper/device/scheduler.cuh"
#include "hopper/device/tile/mma.cuh"
#include "hopper/device/warps.cuh"
#include "hopper/forward/config.hpp"
#include "hopper/forward/params.h"
#include "hopper/forward/roles.cuh"
#include "hopper/forward/rows.cuh"

namespace flash3::hopper {

// Everything that the roles of one kernel share, at compile time.
template <Element kElement_, int kHeadDim, int kHeadDimV, bool kBand_, int kTileN_,
          ForwardSchedule kSchedule_ = ForwardSchedule{}, ScoreKind kScore_ = ScoreKind::kPlain>
struct ForwardTraits {
  static constexpr Element kElement = kElement_;
  static constexpr bool kBand = kBand_;
  static constexpr ScoreKind kScore = kScore_;
  static constexpr ForwardConfig kConfig =
      forward_config(kHeadDim, kHeadDimV, kBand, kTileN_, kSchedule_, kScore_);
  static_assert(kConfig.head_dim == kHeadDim, "the tile table has no such row");
  static_assert(is_valid(kConfig), "too much shared memory or too many registers");
  static constexpr ForwardSchedule kSchedule = kSchedule_;
  static constexpr int kTileM = kConfig.tile_m();
  static constexpr int kTileN = kTileN_;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kWarpgroups = kConfig.warpgroups;

  using QTile = SharedTile<kWarpgroupRows, kHeadDim>;  // one warpgroup's
  using KTile = SharedTile<kTileN, kHeadDim>;
  using VTile = SharedTile<kTileN, kHeadDimV>;
  using OutTile = SharedTile<kWarpgroupRows, kHeadDimV>;  // in the place of QTile

  using KvState = PipelineState<kStages>;
  using QState = PipelineState<kQStages>;

  struct Shared {
    uint8_t q[kQStages][kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    RingBarriers<kQStages> q_barriers[kWarpgroups];  // each warpgroup has its own pace
    RingBarriers<kStages> k_barriers;
    RingBarriers<kStages> v_barriers;
    TileRing tiles;
    OwnRows own_rows[4 * kWarpgroups];             // of each consumer warp: rows.cuh
    RowKeys row_keys[4 * kWarpgroups][kWarpRows];  // what each row sees
    uint64_t v_loaded;                             // but not cleared yet
  };
  static_assert(sizeof(Shared) == kConfig.shared_bytes());
};

}  // namespace flash3::hopper

#include "hopper/forward/load.cuh"
#include "hopper/forward/math.cuh"

namespace flash3::hopper {

template <class Traits>
__global__ void __launch_bounds__(Traits::kConfig.threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);

  if (threadIdx.x == 0) {
    for (auto& barriers : shared.q_barriers) barriers.init(4);  // each warp
    shared.k_barriers.init(4 * Traits::kWarpgroups);            // each consumer warp
    shared.v_barriers.init(4 * Traits::kWarpgroups);
    cuda::ptx::mbarrier_init(&shared.v_loaded, 1);
    shared.tiles.init(3 + kWarpgroupThreads * Traits::kWarpgroups);  // loaders, consumers
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  __syncthreads();

  const int warpgroup = warpgroup_index();
  if constexpr (!Traits::kSchedule.specialised) {
    consume<Traits>(params, shared, warpgroup);
  } else if (warpgroup == 0) {
    release_registers<Traits::kConfig.producer_registers()>();
    const ProducerWarp role{warp_in_warpgroup()};
    if (role == ProducerWarp::kSchedule) {
      schedule_tiles<Traits::kTileN, Traits::kBand>(params.schedule, shared.tiles);
    } else if (threadIdx.x % 32 == 0) {
      if (role == ProducerWarp::kLoadQ) load_q<Traits>(params, shared);
      if (role == ProducerWarp::kLoadK) load_k<Traits>(params, shared);
      if (role == ProducerWarp::kLoadV) load_v<Traits>(params, shared);
    }
  } else {
    acquire_registers<Traits::kConfig.consumer_registers()>();
    consume<Traits>(params, shared, warpgroup - 1);
  }
}

}  // namespace flash3::hopper
