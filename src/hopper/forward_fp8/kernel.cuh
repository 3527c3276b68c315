// SPDX-License-Identifier: Apache-2.0
// The FP8 forward kernel: shared memory, roles, and nothing else. load.cuh is the producer,
// transpose.cuh turns V for the tensor cores, math.cuh is the consumer, store.cuh its epilogue;
// README.md draws the schedule. Schedule, masks and rows are those of the 16-bit kernels.
#pragma once

#include "hopper/device/pipeline.cuh"
#include "hopper/device/ptx/registers.cuh"
#include "hopper/device/scheduler.cuh"
#include "hopper/device/tile/mma.cuh"
#include "hopper/device/warps.cuh"
#include "hopper/forward/config.hpp"
#include "hopper/forward/roles.cuh"
#include "hopper/forward/rows.cuh"

namespace flash3::hopper {

// What the elements of a key tile stand for: the scales of the blocks that it may lie in.
template <int kBlocks>
struct KeyScales {
  float k[kBlocks], v[kBlocks];

  // The tile's own are the largest of them.
  static __device__ __forceinline__ float largest(const float (&scales)[kBlocks]) {
    float x = scales[0];
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) x = fmaxf(x, scales[b]);
    return x;
  }
  __device__ __forceinline__ bool differ() const {
    bool differ = false;
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) differ |= k[b] != k[0] || v[b] != v[0];
    return differ;
  }
};

// Everything that the roles of one kernel share, at compile time.
template <int kHeadDim, int kHeadDimV, bool kBand_, int kTileN_,
          ScoreKind kScore_ = ScoreKind::kPlain, ForwardSchedule kSchedule_ = ForwardSchedule{}>
struct Fp8Traits {
  static constexpr ForwardSchedule kSchedule = kSchedule_;
  static_assert(kSchedule.specialised && !kSchedule.three_stage, "not of FP8 kernels");
  static constexpr bool kBand = kBand_;
  static constexpr ScoreKind kScore = kScore_;
  static constexpr int kTileN = kTileN_;
  static constexpr ForwardConfig kConfig =
      forward_config(kHeadDim, kHeadDimV, kBand, kTileN, kSchedule, kScore, Element::kE4m3);
  static_assert(kConfig.head_dim == kHeadDim, "the tile table has no such row");
  static_assert(is_valid(kConfig), "too much shared memory or too many registers");
  static constexpr int kTileM = kConfig.tile_m();
  static constexpr int kStages = kConfig.stages;
  static constexpr int kRawStages = kConfig.raw_v_stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kWarpgroups = kConfig.warpgroups;

  using QTile = SharedTile<kWarpgroupRows, kHeadDim, 1>;  // one warpgroup's
  using KTile = SharedTile<kTileN, kHeadDim, 1>;
  using RawVTile = SharedTile<kTileN, kHeadDimV, 1>;                  // as it lies in memory
  using VTile = SharedTile<kHeadDimV, transposed_v_cols(kTileN), 1>;  // transposed: transpose.cuh
  using Scales = KeyScales<blocks_of_scales(kTileN)>;

  using KvState = PipelineState<kStages>;
  using RawState = PipelineState<kRawStages>;
  using QState = PipelineState<kQStages>;

  struct Shared {
    uint8_t q[kQStages][kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    uint8_t raw_v[kRawStages][RawVTile::kBytes];
    RingBarriers<kQStages> q_barriers[kWarpgroups];  // each warpgroup has its own pace
    RingBarriers<kStages> k_barriers;
    RingBarriers<kStages> v_barriers;
    RingBarriers<kRawStages> raw_v_barriers;
    TileRing tiles;
    // Of the key tile in K's stage, by the ring's phase: V's are read when K has gone.
    Scales key_scales[2][kStages];
    float q_scales[kQStages][4];  // of each warpgroup
    OwnRows own_rows[4 * kWarpgroups];
    RowKeys row_keys[4 * kWarpgroups][kWarpRows];
    uint64_t v_loaded;  // but not cleared yet
  };
  static_assert(sizeof(Shared) == kConfig.shared_bytes());
};

}  // namespace flash3::hopper

#include "hopper/forward_fp8/load.cuh"
#include "hopper/forward_fp8/math.cuh"
#include "hopper/forward_fp8/transpose.cuh"

namespace flash3::hopper {

template <class Traits>
__global__ void __launch_bounds__(Traits::kConfig.threads(), 1)
    fp8_forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);

  if (threadIdx.x == 0) {
    // Scales arrive by themselves.
    for (auto& barriers : shared.q_barriers) barriers.init(4, 2);
    shared.k_barriers.init(4 * Traits::kWarpgroups, 2);
    shared.v_barriers.init(4 * Traits::kWarpgroups, kTransposeThreads);
    shared.raw_v_barriers.init(kTransposeThreads);
    cuda::ptx::mbarrier_init(&shared.v_loaded, 1);
    // The loader, transposers, consumers.
    shared.tiles.init(1 + kTransposeThreads + kWarpgroupThreads * Traits::kWarpgroups);
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  __syncthreads();

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    release_registers<Traits::kConfig.producer_registers()>();
    const Fp8ProducerWarp role{warp_in_warpgroup()};
    if (role == Fp8ProducerWarp::kSchedule) {
      schedule_tiles<Traits::kTileN, Traits::kBand>(params.schedule, shared.tiles);
    } else if (role >= Fp8ProducerWarp::kTranspose) {
      transpose_v<Traits>(shared, int(threadIdx.x) - 32 * int(Fp8ProducerWarp::kTranspose));
    } else if (threadIdx.x == 0) {
      load_fp8<Traits>(params, shared);
    }
  } else {
    acquire_registers<Traits::kConfig.consumer_registers()>();
    consume_fp8<Traits>(params, shared, warpgroup - 1);
  }
}

}  // namespace flash3::hopper
