// SPDX-License-Identifier: Apache-2.0
// The epilogue of one warpgroup's 64 rows: from registers to global memory. A thread has four
// neighbouring columns of each 16 (transpose_v.cuh), the four threads of a quad the 32 bytes of a
// whole sector.
#pragma once

#include "hopper/forward/warp_rows.cuh"

namespace flash3::hopper {

// Store of FP8 consumers: the final output.
template <class Traits>
struct StoreFp8 {
  static constexpr bool kInPlaceOfQ = false;

  static __device__ __forceinline__ void wait_until_read() {}

  static __device__ __forceinline__ void store(const ForwardParams& params,
                                               const WarpOutput& output, uint8_t*,
                                               const float (&r_o)[Traits::kHeadDimV / 2], int,
                                               int thread) {
    const int first_row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      if (!output.exists(row)) continue;
      uint16_t* out = output.address(row);
#pragma unroll
      for (int i = 0; i < Traits::kHeadDimV / 16; ++i) {
        const float* r = &r_o[8 * i + 2 * h];
        const float x[4] = {r[0], r[4], r[1], r[5]};
        const int col = 16 * i + thread % 4 * 4;
        const auto pack = [&](float low, float high) {
          return params.fp8.out_float16 ? pack2<Element::kFloat16>(low, high)
                                        : pack2<Element::kBFloat16>(low, high);
        };
        const uint2 four = {pack(x[0], x[1]), pack(x[2], x[3])};
        if (params.fp8.out_vec4_aligned) {
          if (col < params.head_dim_v) *reinterpret_cast<uint2*>(out + col) = four;
        } else {
          const uint32_t words[2] = {four.x, four.y};
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (col + e < params.head_dim_v) out[col + e] = uint16_t(words[e / 2] >> 16 * (e % 2));
        }
      }
    }
  }
};

}  // namespace flash3::hopper
