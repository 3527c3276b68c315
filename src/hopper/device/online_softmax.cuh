// Softmax over key tiles that arrive one after the other (Milakov & Gimelshein, arXiv:1805.02867;
// FlashAttention-2, alg. 1).
//
// Scores come unscaled. Each thread keeps two rows; the four threads of a quad hold a row's columns
// between them.
//   m' = max(m, max_j s_j)      p_j = 2^(c·s_j − c·m')      α = 2^(c·m − c·m')      l' = α·l + Σ_j
//   p_j
// with c = softmax_scale · log2 e, so that scale and maximum fold into one FMA before ex2.
#pragma once

#include "hopper/device/element.cuh"
#include "hopper/device/ptx/math.cuh"

namespace flash3::hopper {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);  // NVRTC has no HUGE_VALF

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ int quad_max(int x) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

struct OnlineSoftmax {
  float scale_log2;                             // c
  float row_max[2] = {-kInfinity, -kInfinity};  // m, of unscaled scores
  float row_sum[2] = {0.f, 0.f};                // l, this thread's columns only

  // Turns a tile's scores into probabilities in place; alpha[h] is what row h's earlier output must
  // be multiplied by.
  //
  // One warp has little to hide latency with, so both rows go side by side, with two partial maxima
  // and two partial sums each: four independent chains.
  template <int N>
  __device__ __forceinline__ void update(float (&r_s)[N], float (&alpha)[2]) {
    float tile_max[2], shift[2];
    find_max(r_s, tile_max);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float new_max = fmaxf(row_max[h], tile_max[h]);
      // A row that has seen no key yet has maximum −∞; 0 in its place gives p = 0 instead of NaN.
      shift[h] = new_max == -kInfinity ? 0.f : new_max * scale_log2;
      alpha[h] = exp2_approx(fmaf(row_max[h], scale_log2, -shift[h]));
      row_max[h] = new_max;
    }

    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      r_s[j] = exp2_approx(fmaf(r_s[j], scale_log2, -shift[j / 2 % 2]));
      sum[j % 4] += r_s[j];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_sum[h] = fmaf(row_sum[h], alpha[h], sum[2 * h] + sum[2 * h + 1]);
    }
  }

  // The largest score of each row in this tile.
  //
  // Integers have a maximum of three operands in one instruction (VIMNMX3), and non-negative floats
  // are ordered as their bits are. A tile whose scores are all negative has a negative result,
  // which is of no use; it matters only while the row has not seen a larger one before, and then
  // the warp takes the maximum again in floating point.
  template <int N>
  __device__ __forceinline__ void find_max(const float (&r_s)[N], float (&tile_max)[2]) const {
    int bits[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      bits[c] = __float_as_int(r_s[c]);
#pragma unroll
      for (int j = 4; j < N; j += 8) {
        const int next = __float_as_int(r_s[j + c]);
        bits[c] = max(bits[c], j + 4 < N ? max(next, __float_as_int(r_s[j + 4 + c])) : next);
      }
    }
    bool useless = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int largest = quad_max(max(bits[2 * h], bits[2 * h + 1]));
      tile_max[h] = __int_as_float(largest);
      useless |= largest < 0 && row_max[h] < 0.f;
    }
    if (__any_sync(~0u, useless)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = -kInfinity;
#pragma unroll
        for (int j = 2 * h; j < N; j += 4) largest = fmaxf(largest, fmaxf(r_s[j], r_s[j + 1]));
        tile_max[h] = quad_max(largest);
      }
    }
  }

  // Multiplies each row of an accumulator by its factor.
  template <int N>
  static __device__ __forceinline__ void scale_rows(float (&r_o)[N], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < N; ++j) r_o[j] *= factor[j / 2 % 2];
  }

  // After the last tile: the factor that normalises each row, and its natural log-sum-exp. A row
  // that saw no key: 0, −∞.
  __device__ __forceinline__ void finish(float softmax_scale, float (&inverse_sum)[2],
                                         float (&lse)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(row_sum[h]);
      inverse_sum[h] = sum == 0.f ? 0.f : reciprocal_approx(sum);
      lse[h] = sum == 0.f ? -kInfinity : fmaf(row_max[h], softmax_scale, log_approx(sum));
    }
  }
};

}  // namespace flash3::hopper
