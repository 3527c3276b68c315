// SPDX-License-Identifier: Apache-2.0
// The epilogue of one warpgroup's 64 rows: from registers to global memory. A thread has four
// neighbouring columns of each 16 (transpose.cuh), the four threads of a quad the 32 bytes of a
// whole sector.
#pragma once

#include "hopper/forward/output_rows.cuh"
#include "hopper/forward_fp8/kernel.cuh"

namespace flash3::hopper {

template <class Traits>
__device__ __forceinline__ void store_fp8_output(const ForwardParams& params,
                                                 const OutputRows& rows,
                                                 const float (&r_o)[Traits::VTile::kRows / 2],
                                                 int row_in_warpgroup, int thread) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (!rows.exists(row)) continue;
    uint16_t* out = rows.output(row);
#pragma unroll
    for (int i = 0; i < Traits::VTile::kRows / 16; ++i) {
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

}  // namespace flash3::hopper
