// SPDX-License-Identifier: Apache-2.0
// What the roles of one FP8 kernel share. Beside the 16-bit kernels' tiles there are V as it comes,
// which the producer transposes (load_fp8.cuh), and the scales of Q, K and V.
#pragma once

#include "cuda/sm90/forward/params_fp8.h"
#include "cuda/sm90/forward/traits.cuh"

namespace flash3::cuda::sm90 {

// What the elements of a key tile stand for.
struct KeyTileScales {
  float k, v;
};

// Each thread's factors and float32 sums of O (output_sums.cuh). Either is empty in a kernel that
// does not keep it in shared memory.
template <int kWarpgroups, bool kHas>
struct SharedFactors {
  float2 factors[kWarpgroups][kWarpgroupThreads];
};
template <int kWarpgroups>
struct SharedFactors<kWarpgroups, false> {};
template <int kWarpgroups, int kHeadDimV, bool kHas>
struct SharedSums {
  float4 quads[kWarpgroups][kHeadDimV / 8][kWarpgroupThreads];
};
template <int kWarpgroups, int kHeadDimV>
struct SharedSums<kWarpgroups, kHeadDimV, false> {};

template <ForwardConfig kRow, Element kElement>
struct Fp8Traits : ForwardConstants<kRow, kElement> {
  using Constants = ForwardConstants<kRow, kElement>;
  using Constants::kConfig, Constants::kTileN, Constants::kStages, Constants::kQStages,
      Constants::kWarpgroups;
  static constexpr int kRawParts = kConfig.raw_v_parts();  // of a tile of V
  static constexpr int kRawStages = kConfig.raw_v_stages * kRawParts;

  using QTile = SharedTile<kWarpgroupRows, kConfig.head_dim, 1>;  // one warpgroup's
  using KTile = SharedTile<kTileN, kConfig.head_dim, 1>;
  using RawVTile = SharedTile<kTileN / kRawParts, kConfig.head_dim_v, 1>;  // as it lies in memory
  using VTile = SharedTile<kConfig.head_dim_v, transposed_v_cols(kTileN), 1>;  // transposed
  using RawState = PipelineState<kRawStages>;
  static constexpr bool kTransposesAhead = kRawParts > 1 && RawVTile::kRows % 64 == 0;

  // What the elements of a warpgroup's rows of Q stand for: one scale for all, or one each where
  // the rows may be of several heads.
  static constexpr bool kRowScales = kConfig.row_scales();
  using QScales = float[kRowScales ? kWarpgroupRows : 1];

  static constexpr bool kTwoLevel = kConfig.two_level, kSharedSums = sums_in_shared(kConfig);

  // The sums come first: they keep the tiles' alignment of 1024 bytes, and may be empty.
  struct Common : SharedFactors<kWarpgroups, kTwoLevel>,
                  SharedSums<kWarpgroups, kConfig.head_dim_v, kSharedSums> {
    uint8_t q[kQStages][kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    uint8_t raw_v[kRawStages][RawVTile::kBytes];
    RingBarriers<kQStages> q_barriers[kWarpgroups];  // each warpgroup has its own pace
    RingBarriers<kStages> k_barriers;
    RingBarriers<kStages> v_barriers;
    RingBarriers<kRawStages> raw_v_barriers;
    TileRing tiles;
    // For the key tile in K's stage, by the ring's phase: V's scales are read when K has gone.
    KeyTileScales key_scales[2][kStages];
    QScales q_scales[kQStages][kRowScales ? kWarpgroups : 4];  // each warpgroup's
    WarpQueries warp_queries[4 * kWarpgroups];                 // each consumer warp's
    RowKeys row_keys[4 * kWarpgroups][kWarpRows];              // what each row sees
    uint64_t v_loaded;                                         // but not cleared yet
  };
  using Shared = SharedOf<Common, kRow>;
};

}  // namespace flash3::cuda::sm90
