// SPDX-License-Identifier: Apache-2.0
// Where a warp's rows lie in the output and the LSE, and what 16-bit and FP8 kernels store alike.
#pragma once

#include "hopper/device/sink.cuh"
#include "hopper/forward/warp_queries.cuh"

namespace flash3::hopper {

// A row is counted from the warpgroup's first.
struct WarpOutput {
  const ForwardParams& params;
  const WarpQueries& queries;

  __device__ __forceinline__ int token(int row) const {
    return queries.query + params.pack.query_of(row);
  }
  // False: idle, or behind the end of the sequence.
  __device__ __forceinline__ bool exists(int row) const {
    return token(row) < queries.sequence.q_length && row < params.pack.rows();
  }
  __device__ __forceinline__ int head(int row) const {
    return queries.head_group * params.pack.heads + params.pack.head_of(row);
  }
  __device__ __forceinline__ uint16_t* address(int row) const {
    return params.out_data + queries.sequence.batch * params.out_stride_batch +
           head(row) * params.out_stride_head +
           (int64_t(queries.sequence.q_first) + token(row)) * params.out_stride_seq;
  }
  // Where the row's LSE goes, if there is one.
  __device__ __forceinline__ float* lse(int row) const {
    return params.lse + queries.sequence.batch * params.lse_stride_batch +
           head(row) * params.lse_stride_head + queries.sequence.q_first + token(row);
  }
};

// lse[h] belongs to row_in_warpgroup + 8·h; each quad has its rows four times over, one thread
// writes.
__device__ __forceinline__ void store_lse(const ForwardParams& params, const WarpOutput& output,
                                          int row_in_warpgroup, const float (&lse)[2]) {
  if (params.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (output.exists(row)) *output.lse(row) = lse[h];
  }
}

// Takes the sinks of a thread's two rows into their normalisation and LSE.
__device__ __forceinline__ void add_sinks(const ForwardParams& params, const WarpOutput& output,
                                          int row_in_warpgroup, float (&inverse_sum)[2],
                                          float (&lse)[2]) {
  if (params.sink.data == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (output.exists(row))
      add_sink(load_sink(params.sink, output.head(row)), inverse_sum[h], lse[h]);
  }
}

// Rows that see no key at all: output 0, LSE −∞, or the sink where there is one. Each warp
// stores its own.
__device__ __forceinline__ void store_empty(const ForwardParams& params, const WarpOutput& output,
                                            int thread) {
  const int lane = thread % 32, first_row = thread / 32 * kWarpRows;
  for (int row = first_row; row < first_row + kWarpRows; ++row) {
    if (!output.exists(row)) continue;
    uint16_t* out = output.address(row);
    for (int col = lane; col < params.head_dim_v; col += 32) out[col] = 0;
  }
  const int row = first_row + lane;
  if (params.lse != nullptr && lane < kWarpRows && output.exists(row))
    *output.lse(row) =
        params.sink.data != nullptr ? load_sink(params.sink, output.head(row)) : -kInfinity;
}

}  // namespace flash3::hopper
