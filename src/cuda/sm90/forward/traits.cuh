// SPDX-License-Identifier: Apache-2.0
// What the roles of one 16-bit kernel share: sizes, shared memory and barriers, all from a row of
// the tile table. FP8 kernels have traits_fp8.cuh, and traits_widened.cuh.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/sm90/device/pipeline.cuh"
#include "cuda/sm90/device/scheduler.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/config.hpp"
#include "cuda/sm90/forward/warp_rows.cuh"

namespace flash3::cuda::sm90 {

// Hardware barriers; one id for each consumer warpgroup.
enum class ForwardBarrier : int {
  kPingPong = 1,                                      // this warpgroup may issue its products
  kOutputStaged = kPingPong + kMaxConsumerWarpgroups  // its output tile is in shared memory, or its
                                                      // readers are done with what was there
};

// When a consumer lets the next one issue its products: when its own are issued, when its scores
// are there, or when it knows their maxima.
enum class PassTurn { kAtIssue, kWithScores, kWithMaxima };

// Ping-pong between the consumer warpgroups (FlashAttention-3, §3.1): warpgroup w issues its GEMMs
// after warpgroup w − 1 has, round robin, so that one's softmax runs under the other's GEMMs.
// kFirst: the hardware barrier of warpgroup 0.
template <int kWarpgroups, auto kFirst>
struct PingPongBarrier {
  int warpgroup;

  // The last warpgroup lets the first one begin.
  __device__ __forceinline__ void start() const {
    if (warpgroup == kWarpgroups - 1) arrive();
  }
  // Waits until this warpgroup may issue.
  __device__ __forceinline__ void wait() const { sync(kFirst, warpgroup, 2 * kWarpgroupThreads); }
  // Lets the next warpgroup issue.
  __device__ __forceinline__ void arrive() const {
    const int next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
    sm90::arrive(kFirst, next, 2 * kWarpgroupThreads);
  }
  // Takes the arrival that is left over, so that no barrier stays half full.
  __device__ __forceinline__ void finish() const {
    if (warpgroup == 0) wait();
  }
};

// A number that is part of the type, for lambdas: f(Constant<1>{}) with `constexpr int i = c.value`
// inside.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls f with the run-time i, 0 ≤ i < kCount, as a constant: one copy of f for each value.
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void as_constant(int i, const F& f) {
  if constexpr (kFirst == kCount - 1) {
    f(Constant<kFirst>{});
  } else if (i == kFirst) {
    f(Constant<kFirst>{});
  } else {
    as_constant<kCount, kFirst + 1>(i, f);
  }
}

// Calls first(i) and then second(i), both with i as a constant; with kOnce second() has one copy
// for all values.
template <int kCount, bool kOnce, class First, class Second>
__device__ __forceinline__ void as_constant_then(int i, const First& first, const Second& second) {
  if constexpr (kOnce) {
    as_constant<kCount>(i, [&](auto constant) { first(constant.value); });
    second(i);
  } else {
    as_constant<kCount>(i, [&](auto constant) {
      first(constant.value);
      second(constant.value);
    });
  }
}

// What every kernel is launched with: ForwardParams, and more for other rows (kernel_params.h).
struct ForwardKernelParams;

// The constants that all kernels have in common.
template <ForwardConfig kRow, Element kElement_>
struct ForwardConstants {
  static constexpr Element kElement = kElement_;
  static constexpr ForwardConfig kConfig = kRow;
  static constexpr bool kBand = kConfig.band;
  static constexpr bool kLists = kConfig.lists;
  static constexpr bool kSplit = kConfig.split;
  static constexpr ScoreKind kScore = kConfig.score;
  static constexpr int kTileM = kConfig.tile_m();
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kWarpgroups = kConfig.warpgroups;
  // The band's edge then crosses key tiles that only other warpgroups see.
  static constexpr bool kSkipMaskedTiles = kBand && kTileN < kTileM;
  // Short sequences may share a tile; FP8: a tile's keys have one scale.
  static constexpr bool kSlots = kConfig.operands == Operands::k16Bit;

  using Params = ForwardKernelParams;
  using PingPong = PingPongBarrier<kWarpgroups, ForwardBarrier::kPingPong>;
  using KvState = PipelineState<kStages>;
  using QState = PipelineState<kQStages>;
};

// Shared memory: split kernels, those that walk lists and those with a bias of each pair have more
// than what any other has (split.cuh, list_place.cuh, tile_bias.cuh).
template <class Common, ForwardConfig kRow>
struct SharedOf;
template <class Common, ForwardConfig kRow>
  requires(!kRow.split && !kRow.lists && !kRow.bias_tiles())
struct SharedOf<Common, kRow> : Common {};

template <ForwardConfig kRow, Element kElement>
struct ForwardTraits : ForwardConstants<kRow, kElement> {
  using Constants = ForwardConstants<kRow, kElement>;
  using Constants::kConfig, Constants::kTileN, Constants::kStages, Constants::kQStages,
      Constants::kWarpgroups;

  using QTile = SharedTile<kWarpgroupRows, kConfig.head_dim>;  // one warpgroup's
  using KTile = SharedTile<kTileN, kConfig.head_dim>;
  using VTile = SharedTile<kTileN, kConfig.head_dim_v>;
  using OutTile = SharedTile<kWarpgroupRows, kConfig.head_dim_v>;  // in the place of QTile

  struct Common {
    uint8_t q[kQStages][kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    RingBarriers<kQStages> q_barriers[kWarpgroups];  // each warpgroup has its own pace
    RingBarriers<kStages> k_barriers;
    RingBarriers<kStages> v_barriers;
    TileRing tiles;
    WarpQueries warp_queries[4 * kWarpgroups];     // each consumer warp's
    RowKeys row_keys[4 * kWarpgroups][kWarpRows];  // what each row sees
    uint64_t v_loaded;                             // but not cleared yet
  };
  using Shared = SharedOf<Common, kRow>;
};

}  // namespace flash3::cuda::sm90
