// SPDX-License-Identifier: Apache-2.0
// Softmax over key tiles that arrive one after the other (Milakov & Gimelshein, arXiv:1805.02867;
// FlashAttention-2, alg. 1), with a maximum that follows lazily (FlashAttention-4).
//
// Scores come unscaled. Each thread keeps two rows; the four threads of a quad hold a row's columns
// between them.
//   p_j = 2^(c·s_j − c·m)      l += Σ_j p_j
// with c = softmax_scale · log2 e, so that scale and shift fold into one FMA before ex2. Any m
// gives the same result as long as nothing overflows, so m stays as it is until a score exceeds it
// by more than a slack. Only then
//   m' = max(m, max_j s_j)      l ·= α      O ·= α      with α = 2^(c·m − c·m')
// The usual tile does without the exchange of a row's maximum between threads and without
// rescaling.
//
// Under a softcap c·s − c·m is P(s) − P(m) (softcap.hpp).
#pragma once

#include "cuda/device/score/mod.cuh"
#include "cuda/device/score/row_end.cuh"

namespace flash3::cuda {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The largest of elements first, first + 4, first + 8, … as integers of this type. Integers have a
// maximum of three operands in one instruction (VIMNMX3), and floats of one sign are ordered as
// their bits are: the positive ones as signed integers, the negative ones by their distance from 0
// as unsigned integers. A NaN is furthest out.
template <class Int, int N>
__device__ __forceinline__ Int max_of_bits(const float (&r)[N], int first) {
  Int bits = Int(__float_as_int(r[first]));
#pragma unroll
  for (int j = 4; j < N; j += 8) {
    const Int next = Int(__float_as_int(r[j + first]));
    bits = max(bits, j + 4 < N ? max(next, Int(__float_as_int(r[j + 4 + first]))) : next);
  }
  return bits;
}

// Scores as the online softmax takes them, and in what form it keeps the maximum of a row of them:
// here m is of raw scores, remapped ones under a softcap. Where rows differ in that, r tells which
// of the thread's it is. FP8 has scores of its own (forward/kernel_fp8.cuh).
template <ScoreKind kKind>
struct Score {
  using Mod = ModOf<kKind>;
  static_assert(KeepsOrder<Mod>);
  static constexpr bool kCapped = Mod::kRemaps;
  static constexpr bool kKeepsLargest = true;  // the largest score of a row, for max_logits
  static constexpr bool kShifts = false;       // whether max_of() differs between a row's threads

  Mod mod;                  // to base 2
  float slack;              // by how much a score may exceed its row's maximum
  float least_exact = 0.f;  // under a lower maximum a tile's largest score must be exact

  template <class Params>
  static __device__ __forceinline__ Score of(const Params& params) {
    return {Mod::of(params), params.score_slack, params.least_exact};
  }

  // The score in base 2, less a shift.
  template <class Place>
  __device__ __forceinline__ float log2_above(float s, float shift, const Place& at) const {
    return mod.above(s, shift, at);
  }

  // max_of: m, by a tile's largest score. limit: the largest of those that m serves; a softcap is
  // nowhere steeper than at 0.
  __device__ __forceinline__ float limit(float m) const { return m + slack; }
  __device__ __forceinline__ bool needs_exact(float m) const { return m < least_exact; }
  __device__ __forceinline__ float max_of(float largest, int) const { return largest; }
  __device__ __forceinline__ float shift_of(float m) const { return mod.value(m); }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return mod.above(m, shift);
  }

  // Whether a row's scores below the softcap's range must be remapped.
  __device__ __forceinline__ bool must_remap_negative(float m) const
    requires kCapped
  {
    return mod.cap.must_remap_negative(shift_of(m));
  }
};

// ---- the arithmetic of one row, with which every kernel's softmax raises a maximum ----

// The row's maximum with a tile whose largest score this is: raised only where the tile demands it,
// so that no row's bits depend on its neighbours. A NaN is not within the limit.
__device__ __forceinline__ float raised_max(float m, float limit, float largest) {
  return largest <= limit ? m : fmaxf(m, largest);
}

// What scores are shifted by. 0 in the place of −∞ gives p = 0 instead of NaN.
template <class Score>
__device__ __forceinline__ float shift_under(const Score& score, float m) {
  return m == -kInfinity ? 0.f : score.shift_of(m);
}

// What brings sums from one maximum to another, no lower one; shift: of that. Exactly 1 where
// nothing is raised: rounding would make the fma leave a trace.
template <class Score>
__device__ __forceinline__ float rescaling(const Score& score, float from, float to, float shift) {
  return to == from ? 1.f : exp2_approx(score.max_above(from, shift));
}

// ---- of a tile ----

// Raises the largest scores of rows so far to those of a tile, among this thread's keys.
template <ScoreView View>
__device__ __forceinline__ void keep_largest(const typename View::Scores& r_s,
                                             float (&largest)[View::kRows]) {
#pragma unroll
  for (int r = 0; r < View::kRows; ++r) {
#pragma unroll
    for (int k = 0; k < View::kKeys; k += 2)
      largest[r] = fmaxf(largest[r], fmaxf(View::at(r_s, r, k), View::at(r_s, r, k + 1)));
  }
}

// The largest score of each row among this thread's keys.
template <ScoreView View>
__device__ __forceinline__ void find_max(const typename View::Scores& r_s,
                                         float (&largest)[View::kRows]) {
#pragma unroll
  for (float& x : largest) x = -kInfinity;
  keep_largest<View>(r_s, largest);
}

template <class Score>
struct OnlineSoftmax {
  static constexpr bool kKeepsLargest = Score::kKeepsLargest;

  Score score;
  float row_max[2] = {-kInfinity, -kInfinity};      // m; −∞: no key seen yet
  float row_shift[2] = {0.f, 0.f};                  // c·m or P(m); 0 if m is −∞
  float row_sum[2] = {0.f, 0.f};                    // l, this thread's columns only
  float row_largest[2] = {-kInfinity, -kInfinity};  // score, this thread's columns only
  bool needs_exact = true;                          // of any row of the warp
  bool must_remap_negative = true;                  // of any row of the warp, under a softcap

  // Raises m where a tile's scores demand it; true if that is so for any row of the warp. alpha[h]
  // is what row h's earlier output must be multiplied by.
  template <int N>
  __device__ __forceinline__ bool begin_tile(float (&r_s)[N], float (&alpha)[2]) {
    float largest[2];
    find_max_above_limit(r_s, largest);
    keep_largest(largest);
    // A NaN is not within the limit.
    const bool within =
        score.max_of(largest[0], 0) <= limit(0) && score.max_of(largest[1], 1) <= limit(1);
    const bool raise = __any_sync(~0u, !within);
    alpha[0] = alpha[1] = 1.f;
    if (raise) raise_max(r_s, alpha);
    return raise;
  }

  // Makes p of scores, and adds it to the sums of rows.
  template <int N>
  __device__ __forceinline__ void exponentiate(const QueriesByKeys<N>& view, float (&r_s)[N]) {
    ThreadSums sums;
    make_probabilities(view, r_s, sums);
    add(sums);
  }

  // The same in steps. use(p, at, j) takes what element j has become, and returns what stands in
  // its place: sums are of all weights, whatever is dropped of them later.
  template <int N, class Use>
  __device__ __forceinline__ void make_probabilities(const QueriesByKeys<N>& view, float (&r_s)[N],
                                                     Use& use) const {
    using View = QueriesByKeys<N>;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const ScorePlace<View> at{view, View::row_of(j), View::key_of(j)};
      r_s[j] = use(exp2_approx(score.log2_above(r_s[j], row_shift[at.r], at)), at, j);
    }
  }
  struct ThreadSums {
    // Four independent chains: one warp has little else to hide latency with.
    float sum[4] = {0.f, 0.f, 0.f, 0.f};

    template <class Place>
    __device__ __forceinline__ float operator()(float p, const Place&, int j) {
      sum[j % 4] += p;
      return p;
    }
  };
  __device__ __forceinline__ void add(const ThreadSums& of) {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] += of.sum[2 * r] + of.sum[2 * r + 1];
  }

  // Multiplies each row of an accumulator by its factor.
  template <int N>
  static __device__ __forceinline__ void scale_rows(float (&r_o)[N], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < N; ++j) r_o[j] *= factor[j / 2 % 2];
  }

  // After the last tile: the factor that normalises each row, and its natural log-sum-exp. A row
  // that saw no key: 0, −∞.
  __device__ __forceinline__ void finish(float (&inverse_sum)[2], float (&lse)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(row_sum[h]);
      inverse_sum[h] = inverse_of(sum);
      lse[h] = lse_of(sum, [&] { return score.shift_of(row_max[h]); });
    }
  }

  // After the last tile: the row's largest score, scaled and capped; −∞ for a row that saw no key.
  __device__ __forceinline__ float max_logit(int h) const {
    const float largest = quad_max(row_largest[h]);
    return largest == -kInfinity ? -kInfinity : score.shift_of(largest) * kLn2;
  }

  // ---- for begin_tile, and for what takes its place under a softcap ----

  // The largest maximum that row h's m serves.
  __device__ __forceinline__ float limit(int h) const { return score.limit(row_max[h]); }

  __device__ __forceinline__ void keep_largest(const float (&largest)[2]) {
    if constexpr (Score::kKeepsLargest)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        row_largest[h] = fmaxf(row_largest[h], score.max_of(largest[h], h));
  }

  // The largest score of each row among this thread's keys; if that is negative, and no row needs
  // it exactly, maybe another negative one.
  template <int N>
  __device__ __forceinline__ void find_max_above_limit(const float (&r_s)[N],
                                                       float (&largest)[2]) const {
    if (needs_exact) {
      find_max<QueriesByKeys<N>>(r_s, largest);
    } else {
      find_max_of_positive(r_s, largest);
    }
  }

  // The same where it is positive, else some negative number.
  template <int N>
  static __device__ __forceinline__ void find_max_of_positive(const float (&r_s)[N],
                                                              float (&largest)[2]) {
    int bits[4];  // four chains
#pragma unroll
    for (int c = 0; c < 4; ++c) bits[c] = max_of_bits<int>(r_s, c);
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = __int_as_float(max(bits[2 * h], bits[2 * h + 1]));
  }

  template <int N>
  __device__ __forceinline__ void raise_max(const float (&r_s)[N], float (&alpha)[2]) {
    float largest[2];
    find_max<QueriesByKeys<N>>(r_s, largest);
    if constexpr (Score::kCapped) keep_largest(largest);
    bool exact = false, low = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float m = Score::kShifts ? quad_max(score.max_of(largest[h], h))
                                     : score.max_of(quad_max(largest[h]), h);
      const float new_max = raised_max(row_max[h], limit(h), m);
      row_shift[h] = shift_under(score, new_max);
      alpha[h] = rescaling(score, row_max[h], new_max, row_shift[h]);
      row_max[h] = new_max;
      row_sum[h] *= alpha[h];
      exact |= score.needs_exact(new_max);
      if constexpr (Score::kCapped) low |= score.must_remap_negative(new_max);
    }
    needs_exact = __any_sync(~0u, exact);
    if constexpr (Score::kCapped) must_remap_negative = __any_sync(~0u, low);
  }
};

}  // namespace flash3::cuda
