// SPDX-License-Identifier: Apache-2.0
// A row of the backward's tile table (tile_table.hpp), and what follows from it for its kernel.
// constexpr and NVRTC-clean, like the forward's.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kQueryStages = 2;  // Q with its LSE, and dOut with delta
inline constexpr int kDsStages = 2;

// One kernel: a block owns tile_n keys, keeps their dK and dV in registers, and walks over query
// tiles of tile_m.
struct BackwardConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  bool band = false;   // masks by the band; otherwise only the end of the keys
  bool lists = false;  // walks the lists of a mask (lists.cuh)
  ScoreKind score = ScoreKind::kPlain;
  BiasTerms terms = BiasTerms::kNone;
  int tile_m = 0;
  int tile_n = 0;
  // Both consumer warpgroups work on the same 64 keys: one holds dV, the other dK, and a warpgroup
  // of its own computes dQ. Otherwise each holds dK and dV of 64 keys. README.md draws both.
  bool wide = false;
  // A block takes one key tile after the other, and loads the next one's K, V, Q and dOut under the
  // end of the one before. Otherwise a block has one key tile.
  bool persistent = false;
  int from_queries = 0;  // the least queries of a call that takes this row

  FLASH3_HOST_DEVICE constexpr bool holds(Element element) const {
    return element != Element::kE4m3;
  }
  // The row without what its machine code does not depend on: the type of its kernels.
  FLASH3_HOST_DEVICE constexpr BackwardConfig compiled() const {
    BackwardConfig c = *this;
    c.from_queries = 0;
    return c;
  }

  // Tiles of a bias of each pair come beside those of Q (tile_bias.cuh).
  FLASH3_HOST_DEVICE constexpr bool bias_tiles() const {
    return terms == BiasTerms::kPairs || (terms == BiasTerms::kAny && !wide && !lists);
  }

  // The consumers are warpgroups 1 and 2. Warpgroup 0 is the producer; in wide tiles it computes
  // dQ, and the producer is the last one.
  FLASH3_HOST_DEVICE constexpr int threads() const {
    return 128 * (kConsumerWarpgroups + (wide ? 2 : 1));
  }
  FLASH3_HOST_DEVICE constexpr int producer_warpgroup() const {
    return wide ? kConsumerWarpgroups + 1 : 0;
  }

  // Registers per thread after setmaxnreg (forward/config.hpp).
  FLASH3_HOST_DEVICE constexpr int producer_registers() const {
    return persistent ? 40 : wide && lists ? 32 : 24;
  }
  FLASH3_HOST_DEVICE constexpr int dq_registers() const { return !wide ? 0 : lists ? 64 : 72; }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const {
    return wide ? 208 : persistent ? 232 : 240;
  }
  FLASH3_HOST_DEVICE constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }

  // The kernel computes dQ in blocks of 64 columns, and the workspace holds it so. A block has 64
  // queries, the M of a tensor core product; where tile_m is no multiple of 64 it has all of the
  // tile and is computed transposed.
  FLASH3_HOST_DEVICE constexpr bool dq_transposed() const { return tile_m % 64 != 0; }
  FLASH3_HOST_DEVICE constexpr int dq_queries() const { return dq_transposed() ? tile_m : 64; }
  // Columns of dQ in the workspace: whole blocks. Columns after head_dim hold nothing of use.
  FLASH3_HOST_DEVICE constexpr int dq_columns() const { return (head_dim + 63) / 64 * 64; }

  // Staging buffer for float32 fragments, in float4 per thread of a warpgroup: dQ on its way to the
  // warp that adds it, or P of a wide tile on its way from one warpgroup to the other.
  FLASH3_HOST_DEVICE constexpr int fragment_quads() const {
    return wide ? 8 : tile_m * dq_columns() / 512;
  }

  // Keys whose visible queries lie in shared memory; without a band nothing reads them.
  FLASH3_HOST_DEVICE constexpr int mask_keys() const { return band ? tile_n : 1; }

  // Key tiles that the roles may work on at the same time, and places for their K.
  FLASH3_HOST_DEVICE constexpr int key_tile_slots() const { return persistent ? 2 : 1; }
};

}  // namespace flash3::cuda::sm90
