// SPDX-License-Identifier: Apache-2.0
// What the roles of one decode kernel share: sizes, shared memory and barriers, all from a row of
// the tile table.
//
// The products are transposed: keys are the rows of S and head dims those of O, so that the few
// query rows are the narrow side of a wgmma, which has 64 rows at least and 8 columns.
//
//   S [keys, rows] = K·Qᵀ        O [dim_v, rows] = Vᵀ·P
#pragma once

#include "cuda/device/choice.cuh"
#include "cuda/device/score/mask.cuh"
#include "cuda/sm90/decode/config.hpp"
#include "cuda/sm90/decode/work.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// What a key's score is multiplied by, and what is added to it (key_scales.cuh).
struct KeyScales {
  float k, log2_v;
};

enum class DecodeBarrier : int { kConsumers = 1, kSecondConsumers = 2, kAllConsumers = 3 };

// kKeys: the type of K and V. e4m3 is brought to float16, exactly, for products in float16; such a
// kernel has a softcap or not as its call does.
template <DecodeConfig kRow, Element kKeys_>
struct DecodeTraits {
  static constexpr Element kKeys = kKeys_;
  static constexpr bool kFp8 = kKeys == Element::kE4m3;
  static constexpr Element kElement = kFp8 ? Element::kFloat16 : kKeys;  // of the products
  static constexpr bool kMaxLogits = !kFp8;  // e4m3: scores hold the scale of a value
  static constexpr DecodeConfig kConfig = kRow;
  static constexpr int kConsumers = kConfig.consumers;     // warpgroups
  static constexpr int kRows = kConfig.rows / kConsumers;  // of one consumer warpgroup
  static_assert(kRows % 8 == 0 && (kConsumers == 1 || !kFp8));
  static constexpr bool kCapped = kConfig.score == ScoreKind::kSoftcap;
  static constexpr int kHeadDim = kConfig.head_dim, kHeadDimV = kConfig.head_dim_v;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kKeyBlocks = kTileN / 64;     // of S, 64 keys each
  static constexpr int kDimBlocks = kHeadDimV / 64;  // of O
  static constexpr int kColumns = kRows / 4;         // query rows of which a thread has elements

  // The head dim of element 2h of a thread's accumulators of O, from the first one of its warp:
  // `group` is the thread's of four, and e4m3 comes in pairs of dims (products_fp8.cuh).
  static __device__ __forceinline__ constexpr int dim_of(int group, int h) {
    return kFp8 ? 2 * group + h : group + 8 * h;
  }

  using KTile = SharedTile<kTileN, kHeadDim, element_bytes(kKeys)>;
  using VTile = SharedTile<kTileN, kHeadDimV, element_bytes(kKeys)>;
  using QTile = SharedTile<kRows, kHeadDim>;
  using PTile = SharedTile<kRows, kTileN>;
  using KvState = PipelineState<kStages>;
  using Stored = Choice<kFp8, unsigned char, unsigned short>;  // an element of K and V

  // What e4m3 needs beside that.
  struct SharedFp8 {
    float factors[kRows];               // of the scores of each query row
    KeyScales scales[kStages][kTileN];  // of the tiles of V
    uint64_t scales_full[kStages];      // 32 arrivals
  };
  // A consumer warpgroup's RowSums (fold.cuh), of parked ones.
  struct SharedSums {
    float out[kDimBlocks * kRows / 2][128];
    float max[4][kRows], sum[4][kRows];  // of each warp
  };
  struct Nothing {};

  struct Shared {
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
    uint8_t q[kConsumers][QTile::kBytes];
    uint8_t p[kConsumers][2][PTile::kBytes];
    float reduction[kConsumers][4][kRows];  // of each warp
    RowKeys row_keys[kConsumers][kRows];    // what each query row sees, or its bits of a tree mask
    RingBarriers<kStages> k_barriers, v_barriers;
    RunRing runs;
    Choice<kFp8, SharedFp8, Nothing> fp8;
    Choice<kConfig.parks, SharedSums, Nothing> parked[kConsumers];
  };
  static_assert(sizeof(Shared) <= kConfig.shared_bytes());
  static_assert(kConfig.shared_bytes() <= kMostSharedBytes);
};

}  // namespace flash3::cuda::sm90
