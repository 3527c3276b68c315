// SPDX-License-Identifier: Apache-2.0
// What consumers of biased scores do otherwise (device/score/bias.cuh): a tile's scores become
// values before its mask, and weights may be dropped once they are summed up.
#pragma once

#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/dropout.cuh"
#include "cuda/sm90/forward/consume.cuh"
#include "cuda/sm90/forward/kernel_params.h"

namespace flash3::cuda::sm90 {

template <class Traits>
struct TileBias<Traits, ScoreKind::kBiased> {
  // Those of split kernels and of lists have no register in which a slope could wait for scores.
  static constexpr bool kKeepsSlope = !Traits::kSplit && !Traits::kLists;

  static constexpr BiasTerms kTerms = Traits::kConfig.terms;
  static constexpr bool kAny = kTerms == BiasTerms::kAny;

  const ForwardParams& params;
  const typename Traits::Shared& shared;
  const int& warp;
  float slope;

  // Of a consumer's work tile.
  template <class C>
  static __device__ __forceinline__ TileBias begin(const C& c) {
    const WarpQueries& own = c.shared.warp_queries[c.warp];
    float slope = 0.f;
    if constexpr (kKeepsSlope && C::kDescribeUnderScores) {
      const WorkTile& work = c.tiles.tile();  // which is not described yet
      slope = slope_of(kernel_params(c.params).biased.bias, work.sequence.batch, work.head_group);
    } else if constexpr (kKeepsSlope) {
      slope = slope_of(kernel_params(c.params).biased.bias, own.sequence.batch, own.head_group);
    }
    return {c.params, c.shared, c.warp, slope};
  }

  // Before the mask. True: apply_rarely() is left, beside masks, which a tile seldom needs either.
  template <class Tile>
  __device__ __forceinline__ bool apply(Tile& tile) const {
    const BiasParams& biased = kernel_params(params).biased;
    if (kAny && biased.bias.capped) {
      const ModOf<ScoreKind::kSoftcap> cap{params.softcap};
      remap_tile(cap, tile.scores);
#pragma unroll
      for (float& s : tile.scores) s = cap.value(s);
    }
    return add_bias<kTerms>(head(), of_sequence(tile.view()), tile.scores, biased.scale_log2);
  }
  template <class Tile>
  __device__ __forceinline__ void apply_rarely(Tile& tile) const {
    add_distances(head(), of_sequence(tile.view()), tile.scores,
                  kernel_params(params).biased.scale_log2);
  }

  template <class Tile>
  __device__ __forceinline__ void drop(Tile& tile) const {
    const BiasParams& biased = kernel_params(params).biased;
    if (!has<kTerms>(BiasTerms::kDropout, biased.dropped.threshold != 0)) return;
    const HeadDropout dropout(biased.dropped,
                              queries().sequence.batch * biased.heads_q + queries().head_group);
    drop_weights(dropout, of_sequence(tile.view()), tile.scores);
  }
  __device__ __forceinline__ void scale_normalisation(float (&inverse_sum)[2]) const {
    const DroppedWeights& dropped = kernel_params(params).biased.dropped;
    if (!has<kTerms>(BiasTerms::kDropout, dropped.threshold != 0)) return;
    inverse_sum[0] *= dropped.scale, inverse_sum[1] *= dropped.scale;
  }

 private:
  __device__ __forceinline__ const WarpQueries& queries() const {
    return shared.warp_queries[warp];
  }
  __device__ __forceinline__ HeadBias head() const {
    const ScoreBias& bias = kernel_params(params).biased.bias;
    const ListedSequence& s = queries().sequence;
    const int head = queries().head_group;
    return {bias, s, head, params.schedule.rule.shift(s.q_length, s.k_length),
            kKeepsSlope ? slope : slope_of(bias, s.batch, head)};
  }
  template <class View>
  __device__ __forceinline__ View of_sequence(View view) const {
    return {hide_from_optimizer(view.first_row) + queries().query,
            hide_from_optimizer(view.first_key)};
  }
};

}  // namespace flash3::cuda::sm90
