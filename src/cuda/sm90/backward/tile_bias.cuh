// SPDX-License-Identifier: Apache-2.0
// What consumers of biased scores do otherwise (device/score/bias.cuh): scores become values before
// the mask, and the weights that are dropped go as −p from the scores to dS.
#pragma once

#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/dropout.cuh"
#include "cuda/sm90/backward/kernel_params.h"
#include "cuda/sm90/backward/scores.cuh"

namespace flash3::cuda::sm90 {

// dS of a pair whose p has the sign of −0 where it is dropped.
__device__ __forceinline__ float ds_of_kept(float dp, float p, float scale, float delta) {
  const float kept = __float_as_int(p) < 0 ? 0.f : dp * scale;
  return fabsf(p) * (kept - delta);
}

template <class Traits>
struct Probabilities<Traits, true> {
  static constexpr BiasTerms kTerms = Traits::kConfig.terms;
  static constexpr bool kAny = kTerms == BiasTerms::kAny;

  const BackwardParams& all;
  const BiasParams& params;
  const KeyTile& work;
  int head;
  float slope;

  // Of the query tiles of one head.
  __device__ __forceinline__ Probabilities(const BackwardParams& p, const KeyTile& tile,
                                           int head_index)
      : all(p),
        params(kernel_params(p).biased),
        work(tile),
        head(head_index),
        slope(slope_of(params.bias, tile.sequence.batch, head_index)) {}

  // Before the mask. The softcap's slopes, of float16, wait in r_p.
  template <int N>
  __device__ __forceinline__ void begin(const KeysByQueries<N>& view, float (&r_s)[N],
                                        uint32_t (&r_p)[N / 2]) const {
    if (kAny && params.bias.capped) {
      const ModOf<ScoreKind::kSoftcap> cap{all.softcap};
      remap_tile(cap, r_s);
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        r_s[i] = cap.value(r_s[i]), r_s[i + 1] = cap.value(r_s[i + 1]);
        r_p[i / 2] = pack2<Element::kFloat16>(cap.slope(r_s[i]), cap.slope(r_s[i + 1]));
      }
    }
    const ListedSequence& s = work.sequence;
    const HeadBias of{params.bias, s, head, all.schedule.rule.shift(s.q_length, s.k_length), slope};
    if (add_bias<kTerms>(of, of_sequence(view), r_s, params.scale_log2))
      add_distances(of, of_sequence(view), r_s, params.scale_log2);
  }

  // Replaces values by what dSᵀ is to be multiplied with, and makes Pᵀ as operand.
  template <int N, class Lse>
  __device__ __forceinline__ void compute(const KeysByQueries<N>& view, float (&r_s)[N],
                                          uint32_t (&r_p)[N / 2], const Lse& lse) const {
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = lse(pair);
#pragma unroll
      for (int i = 4 * pair; i < 4 * pair + 4; i += 2) {
        r_s[i] = exp2_approx(r_s[i] - x.x);
        r_s[i + 1] = exp2_approx(r_s[i + 1] - x.y);
      }
    }
    const bool capped = kAny && params.bias.capped, drops = drops_weights();
    if (drops) {
      const HeadDropout dropout(params.dropped, work.sequence.batch * params.heads_q + head);
      sign_dropped(dropout, of_sequence(view), r_s);
    }
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t slopes = r_p[i / 2];
      float kept[2] = {r_s[i], r_s[i + 1]};
      if (drops)
#pragma unroll
        for (float& p : kept) p = fmaxf(p, 0.f) * params.dropped.scale;
      r_p[i / 2] = pack2<Traits::kElement>(kept[0], kept[1]);
      if (capped) {
        r_s[i] *= float16_to_float(uint16_t(slopes));
        r_s[i + 1] *= float16_to_float(uint16_t(slopes >> 16));
      }
    }
  }

  // dSᵀ of dPᵀ in its place.
  template <int N, class Delta>
  __device__ __forceinline__ void subtract(float (&r_dp)[N], const float (&r_p)[N],
                                           const Delta& delta) const {
    if (!drops_weights()) return subtract_delta(r_dp, r_p, delta);
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = delta(pair);
#pragma unroll
      for (int i = 4 * pair; i < 4 * pair + 4; ++i)
        r_dp[i] = ds_of_kept(r_dp[i], r_p[i], params.dropped.scale, i % 2 == 0 ? x.x : x.y);
    }
  }

  template <int N>
  static __device__ __forceinline__ void round(const float (&)[N], uint32_t (&)[N / 2]) {}

 private:
  __device__ __forceinline__ bool drops_weights() const {
    return has<kTerms>(BiasTerms::kDropout, params.dropped.threshold != 0);
  }
  template <int N>
  __device__ __forceinline__ KeysByQueries<N> of_sequence(const KeysByQueries<N>& view) const {
    // What follows of them is computed here: there are no registers for it before.
    return {hide_from_optimizer(view.first_row),
            hide_from_optimizer(view.first_key) + (Traits::kLists ? 0 : work.key)};
  }
};

}  // namespace flash3::cuda::sm90
