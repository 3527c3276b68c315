// SPDX-License-Identifier: Apache-2.0
// The scores of FP8 kernels that add to them what slopes and tables give (tile_bias.cuh). The scale
// of raw scores changes from key tile to key tile, so they become values in base 2 in the same
// step, and the softmax is of these.
#pragma once

#include "cuda/sm90/forward/kernel_fp8.cuh"
#include "cuda/sm90/forward/tile_bias.cuh"

namespace flash3::cuda::sm90 {

// `scale` is for the bias: what the softmax sees has none.
template <bool kRowScales>
struct Fp8Score<ScoreKind::kBiased, kRowScales> : Fp8Score<ScoreKind::kPlain, kRowScales> {
  template <class Params>
  static __device__ __forceinline__ Fp8Score of(const Params&) {
    return {};
  }
  template <class Place>
  __device__ __forceinline__ float log2_above(float s, float shift, const Place&) const {
    return s - shift;
  }
  __device__ __forceinline__ float max_of(float largest, int) const { return largest; }
};

// s · scale + term(offset), by the distance from the view's first element.
template <ScoreView View, class Scale, class Term>
__device__ __forceinline__ void scale_and_add(const Scale& scale, typename View::Scores& r_s,
                                              const Term& term) {
#pragma unroll
  for (int r = 0; r < View::kRows; ++r)
#pragma unroll
    for (int k = 0; k < View::kKeys; ++k) {
      float& s = View::at(r_s, r, k);
      s = fmaf(s, scale.of_row(r), term(View::key_offset(k) - View::row_offset(r)));
    }
}

template <class Traits>
  requires(Traits::kConfig.fp8())
struct TileBias<Traits, BiasTerms::kSlopes> : SlopeRows<Traits> {
  using typename SlopeRows<Traits>::View;
  using SlopeRows<Traits>::SlopeRows, SlopeRows<Traits>::of_tile, SlopeRows<Traits>::slope;

  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) {
    if constexpr (!this->kReads) of_tile = this->find(tile);
    const auto& scale = tile.softmax.score.scale;
    if (of_tile.linear) {
      scale_and_add<View>(scale, tile.scores, [&](int offset) {
        return fmaf(float(offset), of_tile.step, of_tile.first);
      });
      if (!masked) return;
    } else {
      const float first = float(this->distance(tile));
      scale_and_add<View>(scale, tile.scores,
                          [&](int offset) { return -slope * fabsf(first + float(offset)); });
    }
    if (masked) mask();
  }
};

template <class Traits>
  requires(Traits::kConfig.fp8())
struct TileBias<Traits, BiasTerms::kTable> : TableRows<Traits> {
  using typename TableRows<Traits>::View;
  using TableRows<Traits>::TableRows, TableRows<Traits>::of_tile;

  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) {
    const float unit = this->biased().unit;
#pragma unroll
    for (float& x : of_tile.entries) x *= unit;
    scale_and_add<View>(tile.softmax.score.scale, tile.scores, [&](int offset) {
      return of_tile.entries[TableOfTile<View>::place(offset)];
    });
    if (masked) mask();
  }
};

// Calls f(r, k, x) for each score of a view, x: its distance from i', which is found anew for each
// group of scores: no more of what f makes of it is under way than registers can take.
template <ScoreView View, class F>
__device__ __forceinline__ void for_each_in_groups(int distance, const F& f) {
  constexpr int kGroup = 8;
#pragma unroll
  for (int r = 0; r < View::kRows; ++r)
#pragma unroll
    for (int group = 0; group < View::kKeys; group += kGroup) {
      const int first = hide_from_optimizer(distance);
#pragma unroll
      for (int k = group; k < group + kGroup; ++k)
        f(r, k, first, View::key_offset(k) - View::row_offset(r));
    }
}

// Slopes and a table, and either under a softcap.
template <class Traits>
  requires(Traits::kConfig.fp8())
struct TileBias<Traits, BiasTerms::kAny> : BiasedRows<Traits> {
  using View = QueriesByKeys<Traits::kTileN / 2>;

  using BiasedRows<Traits>::BiasedRows;
  template <class Tile, class Mask>
  __device__ __forceinline__ void apply(Tile& tile, bool masked, const Mask& mask) const {
    const ScoreBias& bias = this->biased().bias;
    auto scale = tile.softmax.score.scale;
    if constexpr (!Traits::kLists) {  // which go with no softcap
      if (bias.capped) {
        cap(scale, tile.scores);
        for (float& x : scale.factors) x = 1.f;
      }
    }
    const HeadBias head = this->head();
    const int distance = head.distance(this->of_sequence(tile.view()));
    // 0 where there is none.
    const float slope = slope_of(this->biased(), this->queries().sequence.batch, head.head);
    for_each_in_groups<View>(distance, [&](int r, int k, int first, int offset) {
      float& s = View::at(tile.scores, r, k);
      s = fmaf(s, scale.of_row(r), -slope * fabsf(float(first) + float(offset)));
    });
    if (bias.table != nullptr) add_entries(head, distance, tile.scores);
    if (masked) mask();
  }

 private:
  // Q's factor is 1: scaled scores are what is capped.
  template <class Scale>
  __device__ __forceinline__ void cap(const Scale& scale, typename View::Scores& r_s) const {
    const ModOf<ScoreKind::kSoftcap> cap{this->params.softcap};
    scale_and_add<View>(scale, r_s, [](int) { return 0.f; });
    remap_tile(cap, r_s);
#pragma unroll
    for (float& s : r_s) s = cap.value(s);
  }
  __device__ __forceinline__ void add_entries(const HeadBias& head, int distance,
                                              typename View::Scores& r_s) const {
    const int reach = this->biased().bias.reach;
    const float* const middle =
        this->biased().bias.table + head.head * this->biased().bias.table_head + reach;
    const float unit = this->biased().unit;
    for_each_in_groups<View>(distance, [&](int r, int k, int first, int offset) {
      float& s = View::at(r_s, r, k);
      s = fmaf(__ldg(middle + clamped(first + offset, -reach, reach)), unit, s);
    });
  }
};

}  // namespace flash3::cuda::sm90
