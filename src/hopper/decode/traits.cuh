// SPDX-License-Identifier: Apache-2.0
// What the roles of one decode kernel share: sizes, shared memory and barriers, all from a row of
// the tile table.
//
// The products are transposed: keys are the rows of S and head dims those of O, so that the few
// query rows are the narrow side of a wgmma, which has 64 rows at least and 8 columns.
//
//   S [keys, rows] = K·Qᵀ        O [dim_v, rows] = Vᵀ·P
#pragma once

#include "hopper/decode/config.hpp"
#include "hopper/decode/work.cuh"
#include "hopper/device/band_mask.cuh"
#include "hopper/device/tile/shared_tile.cuh"

namespace flash3::hopper {

enum class DecodeBarrier : int { kConsumers = 1 };

template <Element kElement_, int kHeadDim_, int kHeadDimV_, int kRows_, bool kCapped_>
struct DecodeTraits {
  static constexpr Element kElement = kElement_;
  static constexpr DecodeConfig kConfig = decode_config(kHeadDim_, kHeadDimV_, kRows_);
  static_assert(kConfig.rows == kRows_, "the tile table has no such row");
  static constexpr int kRows = kRows_;
  static constexpr bool kCapped = kCapped_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kKeyBlocks = kTileN / 64;     // of S, 64 keys each
  static constexpr int kDimBlocks = kHeadDimV / 64;  // of O
  static constexpr int kColumns = kRows / 4;         // query rows of which a thread has elements

  using KTile = SharedTile<kTileN, kHeadDim_>;
  using VTile = SharedTile<kTileN, kHeadDimV_>;
  using QTile = SharedTile<kRows, kHeadDim_>;
  using PTile = SharedTile<kRows, kTileN>;
  using KvState = PipelineState<kStages>;

  struct Shared {
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    uint8_t q[QTile::kBytes];
    uint8_t p[2][PTile::kBytes];
    float reduction[4][kRows];  // of each consumer warp
    RowKeys row_keys[kRows];    // what each query row sees
    RingBarriers<kStages> k_barriers, v_barriers;
    RunRing runs;
  };
  static_assert(sizeof(Shared) <= kConfig.shared_bytes());
  static_assert(kConfig.shared_bytes() <= kMostSharedBytes);
};

}  // namespace flash3::hopper
