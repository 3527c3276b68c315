// SPDX-License-Identifier: Apache-2.0
// Operands of a consumer (consume.cuh): float16 and bfloat16.
#pragma once

#include "cuda/device/score/softmax.cuh"
#include "cuda/sm90/device/tile/mma.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/traits.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
struct Operands16Bit {
  using Score = cuda::Score<Traits::kScore>;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kProbabilityRegisters = kTileN / 4;
  static constexpr Descriptor kVLayout = Traits::VTile::kMajorMN;
  // Two warpgroups fall further apart where the next one may issue once the scores are there, three
  // and four issue sooner where it may once the products are issued.
  static constexpr PassTurn kPassTurn =
      Traits::kWarpgroups == 2 ? PassTurn::kWithScores : PassTurn::kAtIssue;
  // One copy of the softmax, not one a stage: less code to fetch. Four warpgroups, and three with
  // capped scores, have too few registers for a stage that is no constant.
  static constexpr bool kOneSoftmax =
      Traits::kWarpgroups < (Traits::kScore == ScoreKind::kSoftcap ? 3 : 4);

  __device__ __forceinline__ Operands16Bit(const ForwardParams&, const typename Traits::Shared&,
                                           int, int) {}

  static __device__ __forceinline__ void issue_scores(float (&r_s)[kTileN / 2], Descriptor q,
                                                      Descriptor k) {
    issue_qk<Traits::kElement, typename Traits::QTile, typename Traits::KTile>(r_s, q, k);
  }
  template <class Tile>
  __device__ __forceinline__ void issue_output(Tile& tile, Descriptor v) const {
    issue_pv<Traits::kElement, typename Traits::VTile>(tile.output, tile.probabilities, v);
  }

  template <class Tile>
  __device__ __forceinline__ void make_probabilities(Tile& tile) const {
    tile.softmax.exponentiate(tile.view(), tile.scores);
    pack_probabilities<Traits::kElement>(tile.scores, tile.probabilities);
  }

  static __device__ __forceinline__ int warp_in_warpgroup(int thread) { return thread / 32; }

  // 16 bits have no scales.
  template <class Tile>
  __device__ __forceinline__ void begin_key_tile(Tile&, const typename Traits::KvState&,
                                                 const typename Traits::KvState&) {}
  template <class Tile>
  __device__ __forceinline__ void scale_scores(Tile&) const {}
  template <class Tile>
  __device__ __forceinline__ bool changes_output(const Tile&) const {
    return false;
  }
  template <class Tile>
  __device__ __forceinline__ void change_output(Tile& tile, bool,
                                                const typename Traits::KvState&) const {
    tile.softmax.scale_rows(tile.output, tile.alpha);
  }
  template <class Tile>
  __device__ __forceinline__ void complete_output(Tile&) const {}
  __device__ __forceinline__ void scale_normalisation(float (&)[2],
                                                      const typename Traits::KvState&) const {}
};

}  // namespace flash3::cuda::sm90
