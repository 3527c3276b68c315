// SPDX-License-Identifier: Apache-2.0
// What consumers of biased scores do otherwise (device/score/bias.cuh): something is added to a
// tile's scores before its mask, or weights are dropped once they are summed up.
#pragma once

#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/dropout.cuh"
#include "cuda/sm90/forward/consume.cuh"
#include "cuda/sm90/forward/kernel_params.h"

namespace flash3::cuda::sm90 {

// What a kernel does unless it says otherwise. apply() adds to raw scores, and masks them if
// `masked`: what few tiles need stands in one place.
struct NoTileBias {
  template <class Tile>
  __device__ __forceinline__ void read(const Tile&) const {}  // while the scores are under way
  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile&, bool masked, const Mask& mask) const {
    if (masked) mask();
  }
  template <class Tile>
  __device__ __forceinline__ void drop(Tile&) const {}  // of weights that are summed up
  __device__ __forceinline__ void scale_normalisation(float (&)[2]) const {}
};

// What all of them know of a work tile. Its queries are described when its first scores are under
// way (WarpQueries).
template <class Traits>
struct BiasedRows : NoTileBias {
  const ForwardParams& params;
  const typename Traits::Shared& shared;
  const int& warp;

  template <class C>
  __device__ __forceinline__ explicit BiasedRows(const C& c)
      : params(c.params), shared(c.shared), warp(c.warp) {}

  // The head, and the batch element, of the work tile that the consumer begins.
  template <class C>
  static __device__ __forceinline__ int2 begun(const C& c) {
    if constexpr (C::kDescribeUnderScores) {  // the tile is still there
      const WorkTile& work = c.tiles.tile();
      return {work.head_group, work.sequence.batch};
    } else {
      const WarpQueries& own = c.shared.warp_queries[c.warp];
      return {own.head_group, own.sequence.batch};
    }
  }

  __device__ __forceinline__ const BiasParams& biased() const {
    return kernel_params(params).biased;
  }
  __device__ __forceinline__ const WarpQueries& queries() const {
    return shared.warp_queries[warp];
  }
  __device__ __forceinline__ HeadBias head() const {
    return {biased(), queries().sequence, queries().head_group, params.schedule.rule};
  }
  __device__ __forceinline__ HeadDropout dropout() const {
    return {biased().dropped, queries().sequence.batch * biased().heads_q + queries().head_group};
  }
  // What is computed of the result is computed there: few registers hold it before.
  template <class View>
  __device__ __forceinline__ View of_sequence(View view) const {
    return {hide_from_optimizer(view.first_row) + queries().query,
            hide_from_optimizer(view.first_key)};
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kAny> : BiasedRows<Traits> {
  using BiasedRows<Traits>::BiasedRows;

  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) const {
    if (this->biased().bias.capped) {
      const ModOf<ScoreKind::kSoftcap> cap{this->params.softcap};
      remap_tile(cap, tile.scores);
#pragma unroll
      for (float& s : tile.scores) s = cap.value(s);
    }
    add_bias(this->head(), this->of_sequence(tile.view()), tile.scores);
    if (masked) mask();
  }
  template <class Tile>
  __device__ __forceinline__ void drop(Tile& tile) const {
    if (this->biased().dropped.threshold != 0)
      drop_weights(this->dropout(), this->of_sequence(tile.view()), tile.scores);
  }
  __device__ __forceinline__ void scale_normalisation(float (&inverse_sum)[2]) const {
    const DroppedWeights& dropped = this->biased().dropped;
    if (dropped.threshold != 0) inverse_sum[0] *= dropped.scale, inverse_sum[1] *= dropped.scale;
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kSlopes> : BiasedRows<Traits> {
  using View = QueriesByKeys<Traits::kTileN / 2>;
  // Three warpgroups have no registers for what waits for scores.
  static constexpr bool kReads = Traits::kWarpgroups == 2;

  float slope;
  SlopeOfTile of_tile;

  template <class C>
  __device__ __forceinline__ explicit TileBias(const C& c) : BiasedRows<Traits>(c) {
    const int2 at = BiasedRows<Traits>::begun(c);
    slope = slope_of(this->biased(), at.y, at.x);
  }
  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile) {
    if constexpr (kReads) of_tile = find(tile);
  }
  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) {
    if constexpr (!kReads) of_tile = find(tile);
    if (of_tile.linear) of_tile.template add<View>(tile.scores);
    if (of_tile.linear && !masked) return;
    if (!of_tile.linear) add_distances<View>(slope, distance(tile), 1.f, tile.scores);
    if (masked) mask();
  }

 private:
  template <class Tile>
  __device__ __forceinline__ int distance(const Tile& tile) const {
    return this->head().distance(this->of_sequence(tile.view()));
  }
  template <class Tile>
  __device__ __forceinline__ SlopeOfTile find(const Tile& tile) const {
    return SlopeOfTile::of<View>(slope, distance(tile));
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kTable> : BiasedRows<Traits> {
  TableOfTile<QueriesByKeys<Traits::kTileN / 2>> of_tile;

  using BiasedRows<Traits>::BiasedRows;
  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile) {
    const HeadBias head = this->head();
    of_tile.load(head, head.distance(this->of_sequence(tile.view())));
  }
  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) const {
    of_tile.add(this->biased().unit, tile.scores);
    if (masked) mask();
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kPairs> : BiasedRows<Traits> {
  PairsOfTile<QueriesByKeys<Traits::kTileN / 2>> of_tile;

  using BiasedRows<Traits>::BiasedRows;
  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile) {
    if (this->biased().bias.in_twos) of_tile.load(this->head(), this->of_sequence(tile.view()));
  }
  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) const {
    const ScoreBias& bias = this->biased().bias;
    if (bias.in_twos)
      of_tile.add(this->biased().unit, bias.type == FloatType::kBFloat16, tile.scores);
    if (bias.in_twos && !masked) return;
    if (!bias.in_twos) add_pairs(this->head(), this->of_sequence(tile.view()), tile.scores);
    if (masked) mask();
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kDropout> : BiasedRows<Traits> {
  HeadDropout of_head;

  template <class C>
  __device__ __forceinline__ explicit TileBias(const C& c)
      : BiasedRows<Traits>(c),
        of_head(this->biased().dropped, BiasedRows<Traits>::begun(c).y * this->biased().heads_q +
                                            BiasedRows<Traits>::begun(c).x) {}

  template <class Tile>
  __device__ __forceinline__ void drop(Tile& tile) const {
    drop_weights(of_head, this->of_sequence(tile.view()), tile.scores);
  }
  __device__ __forceinline__ void scale_normalisation(float (&inverse_sum)[2]) const {
    const float scale = this->biased().dropped.scale;
    inverse_sum[0] *= scale, inverse_sum[1] *= scale;
  }
};

}  // namespace flash3::cuda::sm90
