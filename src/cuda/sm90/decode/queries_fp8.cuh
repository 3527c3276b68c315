// SPDX-License-Identifier: Apache-2.0
// Brings the queries of an item into shared memory in float16, whatever their type: each row times
// a power of two such that its largest element is at 2^14. So bfloat16 keeps all bits of elements
// down to 2^-28 of that, and float16 and e4m3 theirs; what is smaller loses what no float32 sum
// would hold.
#pragma once

#include "cuda/device/ptx/e4m3.cuh"
#include "cuda/sm90/decode/products_fp8.cuh"
#include "cuda/sm90/decode/queries.cuh"

namespace flash3::cuda::sm90 {

__device__ __forceinline__ float load_query(const DecodeParams& params, int64_t at) {
  switch (params.q_type) {
    case Element::kFloat16: return float16_to_float(static_cast<const uint16_t*>(params.q)[at]);
    case Element::kBFloat16: return bfloat16_to_float(static_cast<const uint16_t*>(params.q)[at]);
    default: {
      const uint16_t byte = static_cast<const uint8_t*>(params.q)[at];
      return float16_to_float(uint16_t(e4m3_to_float16(byte)));
    }
  }
}

// The exponent, as a float32 has it, of what a row with this largest element is multiplied by. Rows
// with an infinity stay as they are.
__device__ __forceinline__ uint32_t row_exponent(float largest) {
  const uint32_t exponent = max(__float_as_uint(largest) >> 23, 1u);
  return exponent == 255 ? 127 : min(127 + 127 + 14 - exponent, 253u);
}

// A finite element of a row that is not multiplied.
__device__ __forceinline__ float within_float16(float x) {
  return fabsf(x) < kInfinity ? fminf(fmaxf(x, -65504.f), 65504.f) : x;
}

// As load_queries; shared.fp8.factors gets what the scores of each row are multiplied by, the scale
// of its query with it.
template <class Traits>
__device__ __forceinline__ void load_queries_fp8(const DecodeParams& params, const DecodeRun& run,
                                                 typename Traits::Shared& shared, int thread) {
  using QTile = typename Traits::QTile;
  constexpr int kPairs = Traits::kHeadDim / 64;  // of dims, that a lane has of a row
  const int lane = thread % 32;
#pragma unroll 1
  for (int row = thread / 32; row < Traits::kRows; row += kWarpgroupThreads / 32) {
    float x[kPairs][2] = {};
    float factor = 0.f;
    uint32_t exponent = 127;
    if (row < run.rows) {
      const QueryRow at = query_row(params, run, row);
      const int64_t from = q_offset(params, run, at);
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int dim = 2 * (lane + 32 * i) + e;
          if (dim < params.head_dim) x[i][e] = load_query(params, from + dim);
          largest = fmaxf(largest, fabsf(x[i][e]));
        }
#pragma unroll
      for (int step = 1; step < 32; step *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      exponent = row_exponent(largest);
      factor = __uint_as_float((254 - exponent) << 23) * params.scale_log2 *
               params.q_scale.at(run.batch, at.head,
                                 scale_block(params.q_packed, run.q_row - run.query, run.batch,
                                             run.query + at.query));
    }
    const float scale = __uint_as_float(exponent << 23);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = column_of_dim<typename Traits::KTile>(2 * (lane + 32 * i));
      uint8_t* const to = shared.q[0] + QTile::offset(row, column / 8 * 8) + column % 8 * 2;
      *reinterpret_cast<uint32_t*>(to) = pack2<Element::kFloat16>(within_float16(x[i][0] * scale),
                                                                  within_float16(x[i][1] * scale));
    }
    if (lane == 0) shared.fp8.factors[row] = factor;
  }
  load_row_keys<Traits>(params, run, shared, 0, thread);
  fence_shared_for_async_proxy();
}

}  // namespace flash3::cuda::sm90
