// SPDX-License-Identifier: Apache-2.0
// What the roles of a kernel share whose Q has 16 bits and whose K and V are e4m3. Beside the
// 16-bit kernels' tiles there are K and V as they come, half a tile each, which the producer widens
// (widen_keys.cuh), and their scales.
#pragma once

#include "cuda/sm90/forward/traits_fp8.cuh"

namespace flash3::cuda::sm90 {

template <ForwardConfig kRow, Element kElement>
struct WidenedTraits : ForwardConstants<kRow, kElement> {
  using Constants = ForwardConstants<kRow, kElement>;
  using Constants::kConfig, Constants::kTileN, Constants::kStages, Constants::kQStages,
      Constants::kWarpgroups;
  static constexpr int kRawRows = kConfig.raw_rows(), kRawStages = kConfig.raw_stages;
  static constexpr int kRawParts = kTileN / kRawRows;  // of a tile

  using QTile = SharedTile<kWarpgroupRows, kConfig.head_dim>;  // one warpgroup's
  using KTile = SharedTile<kTileN, kConfig.head_dim>;
  using VTile = SharedTile<kTileN, kConfig.head_dim_v>;
  using OutTile = SharedTile<kWarpgroupRows, kConfig.head_dim_v>;  // in the place of QTile
  using RawKTile = SharedTile<kRawRows, kConfig.head_dim, 1>;      // as it lies in memory
  using RawVTile = SharedTile<kRawRows, kConfig.head_dim_v, 1>;
  using RawState = PipelineState<kRawStages>;

  struct Common {
    uint8_t q[kQStages][kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    uint8_t raw[kRawStages][kConfig.raw_bytes()];    // K and V by turns
    RingBarriers<kQStages> q_barriers[kWarpgroups];  // each warpgroup has its own pace
    RingBarriers<kStages> k_barriers;
    RingBarriers<kStages> v_barriers;
    RingBarriers<kRawStages> raw_barriers;
    TileRing tiles;
    // Of the key tile whose first keys lie in the stage; then for that in K's stage, by the ring's
    // phase: V's scales are read when K has gone.
    KeyTileScales raw_scales[kRawStages];
    KeyTileScales key_scales[2][kStages];
    WarpQueries warp_queries[4 * kWarpgroups];     // each consumer warp's
    RowKeys row_keys[4 * kWarpgroups][kWarpRows];  // what each row sees
    uint64_t v_loaded;                             // but not cleared yet
  };
  using Shared = SharedOf<Common, kRow>;
  static_assert(kConfig.raw_bytes() % 1024 == 0, "what the swizzle repeats after");
};

}  // namespace flash3::cuda::sm90
