// SPDX-License-Identifier: Apache-2.0
// What consumers of biased scores do otherwise (device/score/bias.cuh): something is added to a
// tile's scores before its mask, or weights are dropped once they are summed up.
#pragma once

#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/dropout.cuh"
#include "cuda/sm90/device/bias_tiles.cuh"
#include "cuda/sm90/forward/kernel_16bit.cuh"
#include "cuda/sm90/forward/kernel_params.h"
#include "cuda/sm90/forward/load.cuh"

namespace flash3::cuda::sm90 {

// A warpgroup's tile.
template <int kTileN>
using BiasTile = SharedTile<kWarpgroupRows, kTileN>;

// Shared memory of a kernel with a bias of each pair.
template <ForwardConfig kRow>
struct BiasRing {
  uint8_t bias[kBiasStages][kRow.warpgroups][BiasTile<kRow.tile_n>::kBytes];
};
template <class Common, ForwardConfig kRow>
  requires(kRow.bias_tiles())
struct SharedOf<Common, kRow> : BiasRing<kRow>, Common {
  RingBarriers<kBiasStages> bias_barriers[kRow.warpgroups];
};

// What a kernel does unless it says otherwise. apply() adds to raw scores, and masks them if
// `masked`: one copy of what few tiles need.
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
  using Score = cuda::Score<Traits::kScore>;  // of 16 bits
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

// A bias of each pair, in tiles beside K's that come by a ring of their own for each warpgroup.
template <class Traits, bool kTiles = Traits::kConfig.bias_tiles()>
struct PairTiles : BiasedRows<Traits> {
  using BiasedRows<Traits>::BiasedRows;
};
template <class Traits>
struct PairTiles<Traits, true> : BiasedRows<Traits> {
  typename Traits::Shared& shared;
  const typename Traits::KvState& k_state;
  const int warpgroup, thread;
  PipelineState<kBiasStages> at;

  template <class C>
  __device__ __forceinline__ explicit PairTiles(const C& c)
      : BiasedRows<Traits>(c),
        shared(c.shared),
        k_state(c.k_state),
        warpgroup(c.warpgroup),
        thread(c.thread) {}

  __device__ __forceinline__ const BiasTiles& tiles() const {
    return kernel_params(this->params).bias_tiles;
  }
  // There is one for each tile of K.
  template <class Tile>
  __device__ __forceinline__ void read(const Tile&) {
    static_assert(Traits::kStages == 2 && kBiasStages == 1);
    at = {0, uint32_t(k_state.stage)};
  }
  template <class Tile>
  __device__ __forceinline__ void add_tile(Tile& tile) const {
    // Beside other terms there are no registers for addresses that the compiler would compute
    // early.
    constexpr bool kFew = Traits::kConfig.terms == BiasTerms::kAny;
    auto& barriers = shared.bias_barriers[warpgroup];
    wait(&barriers.full[at.stage], at.phase, "bias_full");
    add_bias_tile<BiasTile<Traits::kTileN>>(
        tiles(), shared.bias[at.stage][warpgroup], this->biased().unit,
        this->biased().bias.type == FloatType::kBFloat16,
        kFew ? hide_from_optimizer(thread) : thread, tile.scores);
    release(&barriers.empty[at.stage], thread);
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kAny> : PairTiles<Traits> {
  using PairTiles<Traits>::PairTiles;

  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) const {
    if (this->biased().bias.capped) {
      const ModOf<ScoreKind::kSoftcap> cap{this->params.softcap};
      remap_tile(cap, tile.scores);
#pragma unroll
      for (float& s : tile.scores) s = cap.value(s);
    }
    add_bias(this->head(), this->of_sequence(tile.view()), tile.scores);
    if constexpr (Traits::kConfig.bias_tiles())
      if (this->tiles().box_rows != 0) this->add_tile(tile);
    if (masked) mask();
  }
  template <class Tile>
  __device__ __forceinline__ void drop(Tile& tile) const {
    if (this->biased().dropped.threshold == 0) return;
    const HeadDropout dropout = this->dropout();
    DropoutWords<QueriesByKeys<Traits::kTileN / 2>> words;
    words.draw(dropout, this->of_sequence(tile.view()));
    words.drop(dropout, tile.scores);
  }
  __device__ __forceinline__ void scale_normalisation(float (&inverse_sum)[2]) const {
    const DroppedWeights& dropped = this->biased().dropped;
    if (dropped.threshold != 0) inverse_sum[0] *= dropped.scale, inverse_sum[1] *= dropped.scale;
  }
};

// What slopes add to a tile, for scores of any format.
template <class Traits>
struct SlopeRows : BiasedRows<Traits> {
  using View = QueriesByKeys<Traits::kTileN / 2>;
  // Three warpgroups, or tiles of 192 keys, have no registers for what waits for scores.
  static constexpr bool kReads = Traits::kWarpgroups == 2 && Traits::kTileN <= 128;

  float slope;
  SlopeOfTile of_tile;

  template <class C>
  __device__ __forceinline__ explicit SlopeRows(const C& c) : BiasedRows<Traits>(c) {
    const int2 at = BiasedRows<Traits>::begun(c);
    slope = slope_of(this->biased(), at.y, at.x);
  }
  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile) {
    if constexpr (kReads) of_tile = find(tile);
  }
  // Of the view's first element.
  template <class Tile>
  __device__ __forceinline__ int distance(const Tile& tile) const {
    return this->head().distance(this->of_sequence(tile.view()));
  }
  template <class Tile>
  __device__ __forceinline__ SlopeOfTile find(const Tile& tile) const {
    return SlopeOfTile::of<View>(slope, distance(tile));
  }
};

// Scores that all lack, in a tile, what the thread's part of a row has in common.
struct ShiftedScore : cuda::Score<ScoreKind::kPlain> {
  static constexpr bool kShifts = true;

  float shift[2] = {0.f, 0.f};

  template <class Params>
  static __device__ __forceinline__ ShiftedScore of(const Params& params) {
    return {Score<ScoreKind::kPlain>::of(params)};
  }
  template <class Place>
  __device__ __forceinline__ float log2_above(float s, float row_shift, const Place& at) const {
    return mod.above(s, row_shift - mod.value(shift[at.r]), at);
  }
  __device__ __forceinline__ float max_of(float largest, int r) const { return largest + shift[r]; }
};
template <class Traits>
struct TileBias<Traits, BiasTerms::kSlopes> : SlopeRows<Traits> {
  using Score = ShiftedScore;
  using typename SlopeRows<Traits>::View;
  using SlopeRows<Traits>::SlopeRows, SlopeRows<Traits>::of_tile, SlopeRows<Traits>::slope;

  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) {
    if constexpr (!this->kReads) of_tile = this->find(tile);
    auto& score = tile.softmax.score;
    if (slope < 0.f) tile.softmax.needs_exact = true;  // else no shift is above 0
#pragma unroll
    for (int r = 0; r < 2; ++r)
      score.shift[r] = of_tile.linear ? of_tile.template offset<View>(r) : 0.f;
    if (of_tile.linear) of_tile.template add_steps<View>(tile.scores);
    if (of_tile.linear && !masked) return;
    if (!of_tile.linear) add_distances<View>(slope, this->distance(tile), 1.f, tile.scores);
    if (masked) mask();
  }
};

// The entries of a table that a tile needs, for scores of any format.
template <class Traits>
struct TableRows : BiasedRows<Traits> {
  using View = QueriesByKeys<Traits::kTileN / 2>;
  TableOfTile<View> of_tile;

  using BiasedRows<Traits>::BiasedRows;
  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile) {
    const HeadBias head = this->head();
    of_tile.load(head, head.distance(this->of_sequence(tile.view())));
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kTable> : TableRows<Traits> {
  using TableRows<Traits>::TableRows;

  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) const {
    this->of_tile.add(this->biased().unit, tile.scores);
    if (masked) mask();
  }
};

// What the copy engine cannot address is read where it lies.
template <class Traits>
struct TileBias<Traits, BiasTerms::kPairs> : PairTiles<Traits> {
  using PairTiles<Traits>::PairTiles;

  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) const {
    if (this->tiles().box_rows != 0) {
      this->add_tile(tile);
      if (!masked) return;
    } else {
      add_pairs(this->head(), this->of_sequence(tile.view()), tile.scores);
    }
    if (masked) mask();
  }
};

// Loads the tiles of a work tile, as K's are loaded.
template <class Traits>
struct BiasLoader<Traits, true> {
  PipelineState<kBiasStages> state = {};

  __device__ __forceinline__ void load(const ForwardParams& params, typename Traits::Shared& shared,
                                       const WorkTile& work) {
    using Tile = BiasTile<Traits::kTileN>;
    const BiasTiles& tiles = kernel_params(params).bias_tiles;
    if (tiles.box_rows == 0) return;
    for (int n = work.key_tile_end - 1; n >= work.key_tile_begin; --n) {
      for (int w = 0; w < Traits::kWarpgroups; ++w) {
        auto& barriers = shared.bias_barriers[w];
        wait(&barriers.empty[state.stage], state.phase ^ 1, "bias_empty");
        uint64_t* const full = &barriers.full[state.stage];
        arrive_expect_bytes(full, bias_bytes<Tile>(tiles));
        load_bias<Tile>(tiles,
                        bias_box(tiles, work.sequence, work.head_group,
                                 work.query + w * Tile::kRows, n * Traits::kTileN),
                        shared.bias[state.stage][w], full);
      }
      state.advance();
    }
  }
};

template <class Traits>
struct TileBias<Traits, BiasTerms::kDropout> : BiasedRows<Traits> {
  HeadDropout of_head;
  DropoutWords<QueriesByKeys<Traits::kTileN / 2>> words;

  template <class C>
  __device__ __forceinline__ explicit TileBias(const C& c)
      : BiasedRows<Traits>(c),
        of_head(this->biased().dropped, BiasedRows<Traits>::begun(c).y * this->biased().heads_q +
                                            BiasedRows<Traits>::begun(c).x) {}

  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile) {
    words.draw(of_head, this->of_sequence(tile.view()));
  }
  template <class Tile>
  __device__ __forceinline__ void drop(Tile& tile) const {
    words.drop(of_head, tile.scores);
  }
  __device__ __forceinline__ void scale_normalisation(float (&inverse_sum)[2]) const {
    const float scale = this->biased().dropped.scale;
    inverse_sum[0] *= scale, inverse_sum[1] *= scale;
  }
};

}  // namespace flash3::cuda::sm90
