// SPDX-License-Identifier: Apache-2.0
// What consumers of biased scores do otherwise (device/score/bias.cuh): something is added to
// scores before the mask; and the weights that are dropped go as −p from the scores to dS.
#pragma once

#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/dropout.cuh"
#include "cuda/sm90/backward/kernel_params.h"
#include "cuda/sm90/backward/produce.cuh"
#include "cuda/sm90/backward/scores.cuh"
#include "cuda/sm90/device/bias_tiles.cuh"

namespace flash3::cuda::sm90 {

// dS of a pair whose p has the sign of −0 where it is dropped.
__device__ __forceinline__ float ds_of_kept(float dp, float p, float scale, float delta) {
  const float kept = __float_as_int(p) < 0 ? 0.f : dp * scale;
  return fabsf(p) * (kept - delta);
}

// The query tile's scores, among those of the sequence. What follows of them is computed where it
// is needed: there are no registers for it before.
template <class Traits, int N>
__device__ __forceinline__ KeysByQueries<N> of_sequence(const KeyTile& work,
                                                        const KeysByQueries<N>& view) {
  return {hide_from_optimizer(view.first_row),
          hide_from_optimizer(view.first_key) + (Traits::kLists ? 0 : work.key)};
}
__device__ __forceinline__ HeadBias head_bias(const BackwardParams& params, const KeyTile& work,
                                              int head) {
  return {kernel_params(params).biased, work.sequence, head, params.schedule.rule};
}

template <class Traits>
struct Probabilities<Traits, BiasTerms::kSlopes> : PlainProbabilities<Traits> {
  using View = KeysByQueries<Traits::kTileM / 2>;
  const KeyTile& work;
  const int head;
  const float slope;

  __device__ __forceinline__ Probabilities(const BackwardParams& params, const KeyTile& tile,
                                           int head_index, const View& view)
      : PlainProbabilities<Traits>(params, tile, head_index, view),
        work(tile),
        head(head_index),
        slope(slope_of(kernel_params(params).biased, tile.sequence.batch, head_index)) {}

  // What the tile's scores get, until compute(): it goes with the LSE, and so costs no operation
  // for each of them. Registers that would wait for the scores with it cost more than they save.
  SlopeOfTile of_tile;

  template <int N>
  __device__ __forceinline__ void begin(const View& view, float (&r_s)[N], uint32_t (&)[N / 2]) {
    const HeadBias of = head_bias(this->params, work, head);
    const int distance = of.distance(of_sequence<Traits>(work, view));
    of_tile = SlopeOfTile::of<View>(slope, distance);
    if (of_tile.linear) return;
    add_distances<View>(slope, distance, 1.f, r_s);
    of_tile.first = of_tile.step = 0.f;
  }
  template <int N, class Lse>
  __device__ __forceinline__ void compute(const View&, float (&r_s)[N], uint32_t (&)[N / 2],
                                          const Lse& lse) const {
    const float scale = this->params.scale_log2, first = of_tile.first * scale,
                step = of_tile.step * scale;
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = lse(pair);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float shift =
            fmaf(-float(View::row_offset(2 * pair + e)), step, first) - (e == 0 ? x.x : x.y);
#pragma unroll
        for (int k = 0; k < View::kKeys; ++k) {
          float& s = View::at(r_s, 2 * pair + e, k);
          s = exp2_approx(fmaf(s, scale, fmaf(float(View::key_offset(k)), step, shift)));
        }
      }
    }
  }
};

template <class Traits>
struct Probabilities<Traits, BiasTerms::kTable> : PlainProbabilities<Traits> {
  using View = KeysByQueries<Traits::kTileM / 2>;
  TableOfTile<View> of_tile;

  __device__ __forceinline__ Probabilities(const BackwardParams& params, const KeyTile& work,
                                           int head, const View& view)
      : PlainProbabilities<Traits>(params, work, head, view) {
    const HeadBias of = head_bias(params, work, head);
    of_tile.load(of, of.distance(of_sequence<Traits>(work, view)));
  }
  template <int N>
  __device__ __forceinline__ void begin(const View&, float (&r_s)[N], uint32_t (&)[N / 2]) const {
    of_tile.add(kernel_params(this->params).biased.unit, r_s);
  }
};

// Tiles of a bias of each pair, which come beside those of Q, and of its gradient.
template <class Traits>
struct PairTiles {
  using View = KeysByQueries<Traits::kTileM / 2>;
  const BackwardParams& all;
  const KeyTile& work;
  const int head;

  __device__ __forceinline__ const BackwardKernelParams& params() const {
    return kernel_params(all);
  }

  // tile: beside the tile of Q. What it holds of queries after the last is another sequence's.
  __device__ __forceinline__ void add(const View& view, const uint8_t* tile, int warpgroup,
                                      int thread, typename View::Scores& r_s) const {
    if (params().bias_tiles.box_rows == 0) return;
    add_transposed_bias_tile<typename Traits::DsTile>(
        params().bias_tiles, tile, params().biased.unit,
        params().biased.bias.type == FloatType::kBFloat16, warpgroup * kWarpgroupRows, thread, r_s);
    const int queries = work.sequence.q_length - view.row(0);
    if (View::row_offset(View::kRows - 1) < queries) return;
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k)
        if (View::row_offset(r) >= queries) View::at(r_s, r, k) = -kInfinity;
  }

  // The gradient's tile is dS: one thread of the block stores it, once both warpgroups have. They
  // write there again after they have met for the next one.
  __device__ __forceinline__ bool stores(int warpgroup, int thread) const {
    return warpgroup == 0 && thread == 0 && params().gradient.box_rows != 0;
  }
  __device__ __forceinline__ void store(int query, const uint8_t* ds) const {
    BoxAt at = bias_box(params().gradient, work.sequence, head, query, work.key);
#pragma unroll
    for (int c = 0; c < Traits::DsTile::kChunks; ++c) {
      at.dim = work.key + c * Traits::DsTile::kChunk;
      tma_store(&params().gradient.map, at, ds + c * Traits::DsTile::kChunkBytes);
    }
    tma_store_commit();
  }
};

// What the copy engine cannot address is read where it lies.
template <class Traits>
struct Probabilities<Traits, BiasTerms::kPairs> : PlainProbabilities<Traits> {
  using View = KeysByQueries<Traits::kTileM / 2>;
  const KeyTile& work;
  const int head;

  __device__ __forceinline__ Probabilities(const BackwardParams& params, const KeyTile& tile,
                                           int head_index, const View& view)
      : PlainProbabilities<Traits>(params, tile, head_index, view), work(tile), head(head_index) {}

  template <int N>
  __device__ __forceinline__ void begin(const View& view, float (&r_s)[N],
                                        uint32_t (&)[N / 2]) const {
    if (kernel_params(this->params).biased.bias.pairs != nullptr)
      add_pairs(head_bias(this->params, work, head), of_sequence<Traits>(work, view), r_s);
  }
};

// Shared memory of a kernel with a bias of each pair.
template <BackwardConfig kRow>
struct BiasStages {
  uint8_t bias[kQueryStages][SharedTile<kRow.tile_m, kRow.tile_n>::kBytes];
};
template <class Common, BackwardConfig kRow>
  requires(kRow.bias_tiles())
struct SharedOf<Common, kRow> : BiasStages<kRow>, Common {};

template <class Traits>
struct BesideQ<Traits, false, true> {
  using Tile = typename Traits::DsTile;
  const BackwardParams& params;
  typename Traits::Shared& shared;
  const KeyTile& work;
  const QueryPlace& at;

  __device__ __forceinline__ BesideQ(const BackwardParams& p, typename Traits::Shared& s,
                                     const KeyTile& tile, const QueryPlace& place)
      : params(p), shared(s), work(tile), at(place) {}

  __device__ __forceinline__ int note(int) const {
    return bias_bytes<Tile>(kernel_params(params).bias_tiles);
  }
  __device__ __forceinline__ void load(int stage, uint64_t* full) const {
    const BiasTiles& tiles = kernel_params(params).bias_tiles;
    if (tiles.box_rows == 0) return;
    load_bias<Tile>(tiles, bias_box(tiles, work.sequence, at.head, at.tile * Tile::kRows, work.key),
                    shared.bias[stage], full);
  }
};

// Dropped weights, of plain scores or of any.
template <class Traits>
struct DroppedProbabilities {
  const BackwardParams& all;
  const BiasParams& params;
  const KeyTile& work;
  const int head;

  template <class View>
  __device__ __forceinline__ DroppedProbabilities(const BackwardParams& p, const KeyTile& tile,
                                                  int head_index, const View&)
      : all(p), params(kernel_params(p).biased), work(tile), head(head_index) {}

  __device__ __forceinline__ HeadDropout dropout() const {
    return {params.dropped, work.sequence.batch * params.heads_q + head};
  }
  // A weight as dV has it. By integers a NaN stays one.
  __device__ __forceinline__ float kept(float p) const {
    return __int_as_float(max(__float_as_int(p), 0)) * params.dropped.scale;
  }
  // dSᵀ of dPᵀ in its place.
  template <int N, class Delta>
  __device__ __forceinline__ void subtract(float (&r_dp)[N], const float (&r_p)[N],
                                           const Delta& delta) const {
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = delta(pair);
#pragma unroll
      for (int i = 4 * pair; i < 4 * pair + 4; ++i)
        r_dp[i] = ds_of_kept(r_dp[i], r_p[i], params.dropped.scale, i % 2 == 0 ? x.x : x.y);
    }
  }
  // The same of four elements, where another warpgroup has made p.
  static __device__ __forceinline__ void subtract(const BackwardParams& all, float* x,
                                                  const float4& p, const float2& delta) {
    const DroppedWeights& dropped = kernel_params(all).biased.dropped;
    const float scale = dropped.threshold == 0 ? 1.f : dropped.scale;
    x[0] = ds_of_kept(x[0], p.x, scale, delta.x), x[1] = ds_of_kept(x[1], p.y, scale, delta.y);
    x[2] = ds_of_kept(x[2], p.z, scale, delta.x), x[3] = ds_of_kept(x[3], p.w, scale, delta.y);
  }

  // compute() makes Pᵀ.
  template <int N>
  static __device__ __forceinline__ void round(const float (&)[N], uint32_t (&)[N / 2]) {}
};

template <class Traits>
struct Probabilities<Traits, BiasTerms::kDropout> : DroppedProbabilities<Traits> {
  using View = KeysByQueries<Traits::kTileM / 2>;
  const HeadDropout of_head;
  DropoutWords<View> words;

  // While the scores are under way.
  __device__ __forceinline__ Probabilities(const BackwardParams& params, const KeyTile& tile,
                                           int head_index, const View& view)
      : DroppedProbabilities<Traits>(params, tile, head_index, view), of_head(this->dropout()) {
    words.draw(of_head, of_sequence<Traits>(tile, view));
  }

  template <int N>
  __device__ __forceinline__ void begin(const KeysByQueries<N>&, float (&)[N],
                                        uint32_t (&)[N / 2]) const {}
  template <int N, class Lse>
  __device__ __forceinline__ void compute(const KeysByQueries<N>& view, float (&r_s)[N],
                                          uint32_t (&r_p)[N / 2], const Lse& lse) const {
    const float scale_log2 = this->all.scale_log2;
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = lse(pair);
#pragma unroll
      for (int i = 4 * pair; i < 4 * pair + 4; ++i)
        r_s[i] = exp2_approx(fmaf(r_s[i], scale_log2, i % 2 == 0 ? -x.x : -x.y));
    }
    words.sign(of_head, r_s);
#pragma unroll
    for (int i = 0; i < N; i += 2)
      r_p[i / 2] = pack2<Traits::kElement>(this->kept(r_s[i]), this->kept(r_s[i + 1]));
  }
};

template <class Traits>
struct Probabilities<Traits, BiasTerms::kAny> : DroppedProbabilities<Traits> {
  using Dropped = DroppedProbabilities<Traits>;
  using Dropped::Dropped, Dropped::params, Dropped::subtract;

  // The softcap's slopes, of float16, wait in r_p.
  template <int N>
  __device__ __forceinline__ void begin(const KeysByQueries<N>& view, float (&r_s)[N],
                                        uint32_t (&r_p)[N / 2]) const {
    if (params.bias.capped) {
      const ModOf<ScoreKind::kSoftcap> cap{this->all.softcap};
      remap_tile(cap, r_s);
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        r_s[i] = cap.value(r_s[i]), r_s[i + 1] = cap.value(r_s[i + 1]);
        r_p[i / 2] = pack2<Element::kFloat16>(cap.slope(r_s[i]), cap.slope(r_s[i + 1]));
      }
    }
    add_bias(head_bias(this->all, this->work, this->head), of_sequence<Traits>(this->work, view),
             r_s);
  }

  template <int N, class Lse>
  __device__ __forceinline__ void compute(const KeysByQueries<N>& view, float (&r_s)[N],
                                          uint32_t (&r_p)[N / 2], const Lse& lse) const {
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = lse(pair);
#pragma unroll
      for (int i = 4 * pair; i < 4 * pair + 4; ++i)
        r_s[i] = exp2_approx(r_s[i] - (i % 2 == 0 ? x.x : x.y));
    }
    const bool drops = params.dropped.threshold != 0;
    if (drops) {
      const HeadDropout dropout = this->dropout();
      DropoutWords<KeysByQueries<N>> words;
      words.draw(dropout, of_sequence<Traits>(this->work, view));
      words.sign(dropout, r_s);
    }
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t slopes = r_p[i / 2];
      float kept[2] = {r_s[i], r_s[i + 1]};
      if (drops)
#pragma unroll
        for (float& p : kept) p = this->kept(p);
      r_p[i / 2] = pack2<Traits::kElement>(kept[0], kept[1]);
      if (params.bias.capped) {
        r_s[i] *= float16_to_float(uint16_t(slopes));
        r_s[i + 1] *= float16_to_float(uint16_t(slopes >> 16));
      }
    }
  }

  template <int N, class Delta>
  __device__ __forceinline__ void subtract(float (&r_dp)[N], const float (&r_p)[N],
                                           const Delta& delta) const {
    if (params.dropped.threshold == 0)
      subtract_delta(r_dp, r_p, delta);
    else
      Dropped::subtract(r_dp, r_p, delta);
  }
};

}  // namespace flash3::cuda::sm90
