// SPDX-License-Identifier: Apache-2.0
// What the roles of a backward kernel share: its tiles, its shared memory and its barriers.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/sm90/backward/config.hpp"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/device/pipeline.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

inline constexpr int kConsumerThreads = kConsumerWarpgroups * kWarpgroupThreads;

// The hardware barriers of a block.
enum class BackwardBarrier : int {
  kOutputStaged = 1,  // one for each consumer warpgroup: its gradient is in shared memory
  // dS of both consumer warpgroups is in shared memory.
  kDsStored = kOutputStaged + kConsumerWarpgroups,
  kOwnKeysRead,  // no consumer reads the block's K and V any more
};

// Stage and phase of a query tile's Q and dOut, of its dS, and of buffers with one stage: P of a
// wide tile, and dQ on its way to the sums.
using QueryState = PipelineState<kQueryStages>;
using DsState = PipelineState<kDsStages>;
using SingleState = PipelineState<1>;

// What every kernel is launched with: BackwardParams, and more for lists (kernel_params.h).
struct BackwardKernelParams;

// Shared memory: kernels that walk lists and those with a bias of each pair have more than what any
// other has (lists.cuh, tile_bias.cuh).
template <class Common, BackwardConfig kRow>
struct SharedOf;
template <class Common, BackwardConfig kRow>
  requires(!kRow.lists && !kRow.bias_tiles())
struct SharedOf<Common, kRow> : Common {};

template <BackwardConfig kRow, Element kElement_>
struct BackwardTraits {
  static constexpr BackwardConfig kConfig = kRow;
  static constexpr Element kElement = kElement_;
  static constexpr bool kBand = kConfig.band;
  static constexpr bool kLists = kConfig.lists;
  static constexpr bool kCapped = kConfig.score == ScoreKind::kSoftcap;
  static constexpr bool kBiased = kConfig.terms != BiasTerms::kNone;
  static constexpr bool kBiasTiles = kConfig.bias_tiles();  // beside those of Q
  // Scores take all registers that there are.
  static constexpr bool kFull = kCapped || kConfig.terms == BiasTerms::kAny;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr bool kPersistent = kConfig.persistent;
  static constexpr int kKeySlots = kConfig.key_tile_slots();
  static constexpr int kOwnQuads = kConfig.fragment_quads() / kConsumerWarpgroups;  // staged dQ
  // dQ is a query tile's last product, not dK, and half of the exponentials are held under dP. At
  // d 64 products are half as long beside as many exponentials; d 128 is 2 to 5 % slower with it.
  static constexpr bool kDqLast = kHeadDim == 64 && !kFull;

  using Params = BackwardKernelParams;
  using KeyState = PipelineState<kKeySlots>;  // of a key tile: its work and its K

  using KTile = SharedTile<kTileN, kHeadDim>;
  using VTile = SharedTile<kTileN, kHeadDimV>;
  using QTile = SharedTile<kTileM, kHeadDim>;
  using DoutTile = SharedTile<kTileM, kHeadDimV>;
  using DsTile = SharedTile<kTileM, kTileN>;  // dS: queries × keys

  struct Common {
    uint8_t k[kKeySlots][KTile::kBytes];
    uint8_t v[VTile::kBytes];
    uint8_t q[kQueryStages][QTile::kBytes];
    uint8_t dout[kQueryStages][DoutTile::kBytes];
    uint8_t ds[kDsStages][DsTile::kBytes];
    float4 fragments[kConfig.fragment_quads()][kWarpgroupThreads];
    float lse[kQueryStages][kTileM];  // base 2
    float delta[kQueryStages][kTileM];
    RingBarriers<kQueryStages> q_barriers;
    RingBarriers<kQueryStages> dout_barriers;
    RingBarriers<kKeySlots> k_barriers;
    uint64_t v_full, v_empty;
    uint64_t dq_full[kConsumerWarpgroups], dq_empty[kConsumerWarpgroups];
    RingBarriers<1> p_barriers;             // wide
    RingBarriers<kDsStages> ds_barriers;    // wide
    uint64_t own_keys_read;                 // wide: the consumers have read K and V
    RingBarriers<kKeySlots> work_barriers;  // persistent
    uint64_t k_loaded, v_loaded;            // TMA has written K, V; hidden keys are not cleared yet
    uint64_t dq_ready, dq_added;  // wide, deterministic: the block may add its dQ, has added
    RowKeys seen_by[kConfig.mask_keys()];  // of each key: the queries that see it
    KeyTile work[kKeySlots];
    uint32_t never_written;  // the address of a store that never happens
  };
  using Shared = SharedOf<Common, kRow>;
};

// What the producer warpgroup and a consumer warpgroup do: produce.cuh and consume.cuh, or for wide
// tiles produce_wide.cuh and consume_wide.cuh, and accumulate_dq.cuh what the warpgroup of dQ does.
template <class Traits, bool kWide = Traits::kConfig.wide>
struct Roles;

template <class Roles, class Traits>
concept RolesFor =
    requires(const BackwardParams& params, typename Traits::Shared& shared, const KeyTile& work) {
      Roles::produce(params, shared, work);
      Roles::consume(params, shared, work, 0);  // the consumer warpgroup
    } && (!Traits::kConfig.wide ||
          requires(const BackwardParams& params, typename Traits::Shared& shared,
                   const KeyTile& work) { Roles::accumulate_dq(params, shared, work); });

}  // namespace flash3::cuda::sm90
