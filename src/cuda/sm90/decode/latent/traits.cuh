// SPDX-License-Identifier: Apache-2.0
// What the roles of the latent kernel share: sizes, shared memory and barriers.
//
// A key is its latent part (512), then its rope part (64), and its value is the latent part
// (DeepSeek-V2, §2.1). So a tile of V serves both products:
//
//   S [rows, keys] = Q_rope·K_ropeᵀ + Q_latent·Vᵀ        O [rows, 512] += P·V
#pragma once

#include "cuda/sm90/decode/traits.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// In a cluster an address begins with the block's rank, which is not a descriptor's.
__device__ __forceinline__ Descriptor descriptor_in_cluster(Descriptor layout, const void* shared) {
  return layout + int(__cvta_generic_to_shared(shared) & 0x3ffff);
}

template <DecodeConfig kRow, Element kElement_>
struct LatentTraits {
  static constexpr Element kElement = kElement_, kKeys = kElement_;
  static constexpr bool kFp8 = false, kMaxLogits = true;
  static constexpr DecodeConfig kConfig = kRow;
  static constexpr int kRows = kConfig.rows, kTileN = kConfig.tile_n, kStages = kConfig.stages;
  static constexpr int kHeadDim = kConfig.head_dim, kHeadDimV = kConfig.head_dim_v;
  static constexpr int kWarpgroups = 2;  // of consumers
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kDims = kHeadDimV / kWarpgroups;  // of which each computes O
  static_assert(kRows == kWarpgroupRows, "a wgmma has 64 rows");

  using KTile = SharedTile<kTileN, kHeadDim>;   // the rope parts
  using VTile = SharedTile<kTileN, kHeadDimV>;  // the latent parts
  using QTile = SharedTile<kRows, kHeadDimV + kHeadDim>;
  static constexpr int kGroups = 4;  // of latent head dims, each with a barrier of its own
  static constexpr int kGroupDims = kHeadDimV / kGroups;
  static constexpr int kGroupBytes = VTile::kBytes / kGroups;
  static_assert(kGroupDims % VTile::kChunk == 0);
  using PTile = SharedTile<kRows, kTileN>;
  using KvState = PipelineState<kStages>;
  using Stored = unsigned short;

  // The part of V that a warpgroup multiplies.
  using HalfTile = SharedTile<kTileN, kDims>;
  static_assert(HalfTile::kChunkBytes == VTile::kChunkBytes);
  // P of a tile takes the place of its rope parts, which only the scores need.
  static_assert(PTile::kBytes == KTile::kBytes);

  struct Shared {
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    uint8_t q[QTile::kBytes];
    float max[kStages][kRows];    // to which P of the stage refers, where a warp has
    uint32_t raised[kStages][4];  // raised it
    float sums[kWarpgroups][kRows], largest[kWarpgroups][kRows];
    RowKeys row_keys[kRows];  // what each query row sees
    uint64_t k_full[kStages], v_full[kStages][kGroups], empty[kStages];
    uint64_t p_full[kStages];  // 4 arrivals, of the warps that have computed P
    RunRing runs;
  };
  static_assert(sizeof(Shared) <= kConfig.shared_bytes());
  static_assert(kConfig.shared_bytes() <= kMostSharedBytes);
};

}  // namespace flash3::cuda::sm90
