// SPDX-License-Identifier: Apache-2.0
// What becomes of the scores of kernels with a softcap.
#pragma once

#include "cuda/device/softcap_remap.cuh"
#include "cuda/sm90/backward/scores.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
struct Probabilities<Traits, true> {
  template <int N>
  static __device__ __forceinline__ void remap(const BackwardParams& params, float (&r_s)[N]) {
    remap_tile(params.softcap, r_s);
  }

  // Takes remapped scores: rounds Pᵀ = exp2(tanh · scale − lse) into r_p, and replaces the scores
  // by Pᵀ · (1 − tanh²), by which dSᵀ = … ∘ (dP − delta) multiplies. So nothing of tanh has to wait
  // for dP. Both are 0 for hidden pairs: their tanh is −∞ here, and the slope saturates.
  template <int N, class Lse>
  static __device__ __forceinline__ void compute(const BackwardParams& params, float (&r_s)[N],
                                                 uint32_t (&r_p)[N / 2], const Lse& lse) {
    const Softcap& cap = params.softcap;
    const float scale_log2 = params.scale_log2;
#pragma unroll
    for (int pair = 0; pair < N / 4; ++pair) {
      const float2 x = lse(pair);
#pragma unroll
      for (int i = 4 * pair; i < 4 * pair + 4; i += 2) {
        const float tanh[2] = {r_s[i] * cap.factor(r_s[i]), r_s[i + 1] * cap.factor(r_s[i + 1])};
        const float p[2] = {exp2_approx(fmaf(tanh[0], scale_log2, -x.x)),
                            exp2_approx(fmaf(tanh[1], scale_log2, -x.y))};
        r_p[i / 2] = pack2<Traits::kElement>(p[0], p[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) r_s[i + e] = p[e] * __saturatef(fmaf(-tanh[e], tanh[e], 1.f));
      }
    }
  }

  template <int N>
  static __device__ __forceinline__ void round(const float (&)[N], uint32_t (&)[N / 2]) {}
};

}  // namespace flash3::cuda::sm90
