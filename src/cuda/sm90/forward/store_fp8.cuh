// SPDX-License-Identifier: Apache-2.0
// The epilogue of one warpgroup's 64 rows: from registers to global memory. A thread has four
// neighbouring columns of each 16 (transpose_v.cuh), the four threads of a quad the 32 bytes of a
// whole sector.
#pragma once

#include "cuda/sm90/forward/warp_rows.cuh"

namespace flash3::cuda::sm90 {

// Stores four columns of a row: together where each four lie in as many aligned bytes.
template <class T, class Quad>
__device__ __forceinline__ void store_quad(T* to, const Quad& quad, int columns, bool together) {
  if (together) {
    if (columns > 0) *reinterpret_cast<Quad*>(to) = quad;
  } else {
    const T(&x)[4] = reinterpret_cast<const T(&)[4]>(quad);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < columns) to[e] = x[e];
  }
}

// Store of FP8 consumers: the final output.
template <class Traits>
struct StoreFp8 {
  static constexpr bool kInPlaceOfQ = false;

  static __device__ __forceinline__ void wait_until_read() {}

  static __device__ __forceinline__ void store(const ForwardParams& params,
                                               const WarpOutput& output, uint8_t*,
                                               const float (&r_o)[Traits::kHeadDimV / 2], int,
                                               int thread) {
    if (params.out_type == FloatType::kFloat32) {
      store_rows<float>(params, output, r_o, thread, [](const float4& x) { return x; });
    } else {
      const auto pack = [&](float low, float high) {
        return params.out_type == FloatType::kFloat16 ? pack2<Element::kFloat16>(low, high)
                                                      : pack2<Element::kBFloat16>(low, high);
      };
      store_rows<uint16_t>(params, output, r_o, thread,
                           [&](const float4& x) { return uint2{pack(x.x, x.y), pack(x.z, x.w)}; });
    }
  }

 private:
  // Stores a thread's two rows, each four columns as `quad_of` makes them.
  template <class T, class QuadOf>
  static __device__ __forceinline__ void store_rows(const ForwardParams& params,
                                                    const WarpOutput& output,
                                                    const float (&r_o)[Traits::kHeadDimV / 2],
                                                    int thread, const QuadOf& quad_of) {
    const int first_row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      if (!output.exists(row)) continue;
      T* const out = output.address<T>(row);
      const auto quad = [&](int i) {
        const float* r = &r_o[8 * i + 2 * h];
        return quad_of(float4{r[0], r[4], r[1], r[5]});
      };
      const int first_col = thread % 4 * 4;
      // The usual rows need no branch each four columns. Split kernels lack a register for that.
      if (!Traits::kSplit && params.out_in_quads && params.head_dim_v == Traits::kHeadDimV) {
#pragma unroll
        for (int i = 0; i < Traits::kHeadDimV / 16; ++i)
          store_quad(out + 16 * i + first_col, quad(i), 4, true);
        continue;
      }
#pragma unroll
      for (int i = 0; i < Traits::kHeadDimV / 16; ++i) {
        const int col = 16 * i + first_col;
        store_quad(out + col, quad(i), params.head_dim_v - col, params.out_in_quads);
      }
    }
  }
};

}  // namespace flash3::cuda::sm90
