// SPDX-License-Identifier: Apache-2.0
// The backward kernel: shared memory, roles, and nothing else. load.cuh is the producer, math.cuh
// the consumer, store.cuh the consumer's epilogue; README.md draws the schedule.
#pragma once

#include "hopper/backward/config.hpp"
#include "hopper/backward/params.h"
#include "hopper/backward/roles.cuh"
#include "hopper/device/band_mask.cuh"
#include "hopper/device/pipeline.cuh"
#include "hopper/device/ptx/grid.cuh"
#include "hopper/device/ptx/registers.cuh"
#include "hopper/device/tile/mma.cuh"
#include "hopper/device/warps.cuh"
#include "hopper/varlen/find_sequence.cuh"

namespace flash3::hopper {

// Stage and phase of a query tile's Q and dOut, of its dS, and of what has one stage: a wide tile's
// P, and dQ on its way to the sums.
using QueryState = PipelineState<kQueryStages>;
using DsState = PipelineState<kDsStages>;
using SingleState = PipelineState<1>;

// Everything that the roles of one kernel share, at compile time.
template <Element kElement_, int kHeadDim_, int kHeadDimV_, bool kBand_, ScoreKind kScore,
          int kTileM_, int kTileN_>
struct BackwardTraits {
  static constexpr Element kElement = kElement_;
  static constexpr bool kBand = kBand_;
  static constexpr bool kCapped = kScore == ScoreKind::kSoftcap;
  static constexpr BackwardConfig kConfig =
      backward_config(kHeadDim_, kHeadDimV_, kBand_, kScore, kTileM_, kTileN_);
  static_assert(kConfig.head_dim == kHeadDim_, "the tile table has no such row");
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  // Of the staged dQ, each warpgroup's.
  static constexpr int kOwnQuads = kConfig.fragment_quads() / kConsumerWarpgroups;

  using KTile = SharedTile<kTileN, kHeadDim>;
  using VTile = SharedTile<kTileN, kHeadDimV>;
  using QTile = SharedTile<kTileM, kHeadDim>;
  using DoutTile = SharedTile<kTileM, kHeadDimV>;
  using DsTile = SharedTile<kTileM, kTileN>;  // dS: queries × keys

  struct Shared {
    uint8_t k[KTile::kBytes];
    uint8_t v[VTile::kBytes];
    uint8_t q[kQueryStages][QTile::kBytes];
    uint8_t dout[kQueryStages][DoutTile::kBytes];
    uint8_t ds[kDsStages][DsTile::kBytes];
    float4 fragments[kConfig.fragment_quads()][kWarpgroupThreads];
    float lse[kQueryStages][kTileM];  // base 2
    float delta[kQueryStages][kTileM];
    RingBarriers<kQueryStages> q_barriers;
    RingBarriers<kQueryStages> dout_barriers;
    uint64_t k_full, v_full;
    uint64_t dq_full[kConsumerWarpgroups], dq_empty[kConsumerWarpgroups];
    RingBarriers<1> p_barriers;  // wide, as the next
    RingBarriers<kDsStages> ds_barriers;
    uint64_t tile_read;
    KeyTile work;
    RowKeys seen_by[kConfig.mask_keys()];  // a key: these queries
    uint64_t k_loaded, v_loaded;           // but not cleared yet
  };
  static_assert(sizeof(Shared) == kConfig.shared_bytes());
};

}  // namespace flash3::hopper

#include "hopper/backward/add_dq.cuh"
#include "hopper/backward/load.cuh"
#include "hopper/backward/math.cuh"
#include "hopper/backward/math_wide.cuh"
#include "hopper/backward/produce_wide.cuh"

namespace flash3::hopper {

// Writes the block's work. By a whole warp.
template <class Traits>
__device__ __forceinline__ void find_work(const BackwardParams& params,
                                          typename Traits::Shared& shared) {
  const KeySchedule& schedule = params.schedule;
  const SequenceList& list = schedule.sequences;
  const bool leader = threadIdx.x % 32 == 0;
  int index = int(blockIdx.x), heads = schedule.kv_heads;
  if (params.ticket != nullptr)
    index = __shfl_sync(~0u, leader ? atomicAdd(params.ticket, 1) : 0, 0);
  SequenceRows sequence = schedule.one_length;
  if (list.rows != nullptr) {
    const ListedTile found = find_sequence(list, index);
    sequence = found.valid ? found.sequence : SequenceRows{};  // without a tile
    index = found.index;
    heads = schedule.heads_k;
  }
  if (leader)
    shared.work = decode_key_tile(schedule, sequence, heads, Traits::kTileN, Traits::kBand, index);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);

  launch_dependents();
  if (threadIdx.x == 0) {
    constexpr int kReaders = kConsumerWarpgroups * kWarpgroupThreads;
    shared.q_barriers.init(kReaders);
    shared.dout_barriers.init(kReaders);
    shared.p_barriers.init(kWarpgroupThreads, kWarpgroupThreads);
    shared.ds_barriers.init(kWarpgroupThreads, kWarpgroupThreads);
    cuda::ptx::mbarrier_init(&shared.k_full, 1);
    cuda::ptx::mbarrier_init(&shared.v_full, 1);
    cuda::ptx::mbarrier_init(&shared.k_loaded, 1);
    cuda::ptx::mbarrier_init(&shared.v_loaded, 1);
    cuda::ptx::mbarrier_init(&shared.tile_read, kReaders);
    for (int w = 0; w < kConsumerWarpgroups; ++w) {
      cuda::ptx::mbarrier_init(&shared.dq_full[w], kWarpgroupThreads);
      cuda::ptx::mbarrier_init(&shared.dq_empty[w], 1);
    }
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  wait_for_previous_kernel();
  if (threadIdx.x / 32 == 1) find_work<Traits>(params, shared);
  __syncthreads();

  const KeyTile& work = shared.work;
  if (!work.valid) return;
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    release_registers<Traits::kConfig.producer_registers()>();
    if constexpr (Traits::kConfig.wide) {
      produce_wide<Traits>(params, shared, work);
    } else {
      const BackwardProducerWarp role{warp_in_warpgroup()};
      if (threadIdx.x % 32 == 0) {
        if (role == BackwardProducerWarp::kLoadQ) load_q_side<Traits>(params, shared, work);
        if (role == BackwardProducerWarp::kLoadDout) load_dout_side<Traits>(params, shared, work);
        if (role >= BackwardProducerWarp::kAddDq)
          add_dq<Traits>(params, shared, work, int(role) - int(BackwardProducerWarp::kAddDq));
      }
    }
  } else {
    acquire_registers<Traits::kConfig.consumer_registers()>();
    if constexpr (Traits::kConfig.wide) {
      accumulate_wide<Traits>(params, shared, work, warpgroup - 1);
    } else {
      accumulate<Traits>(params, shared, work, warpgroup - 1);
    }
  }
}

}  // namespace flash3::hopper
