// SPDX-License-Identifier: Apache-2.0
// A thread's share of what a split has computed, and how two are merged (device/score/partial.hpp).
//
// The order is fixed (work.hpp): eight splits are merged into a fold, and an item's folds into the
// item, both from the first to the last. A block merges what its splits hold whole and leaves the
// rest as partials in the workspace (partials.cuh). Blocks after those that compute merge these
// with the same arithmetic, to folds and then to the item.
#pragma once

#include "cuda/device/score/partial.hpp"
#include "cuda/device/score/row_end.cuh"
#include "cuda/sm90/decode/traits.cuh"

namespace flash3::cuda::sm90 {

// e^x of scores in base 2, for partials of them (score/partial.hpp).
struct Exp2 {
  __device__ __forceinline__ float operator()(float x) const { return exp2_approx(x); }
};

// A thread's share of a partial. Element 4j + 2h + e of block b of `out` is head dim
// 64·b + 16·warp + dim_of(lane / 4, h) of query row 8·j + 2·(lane % 4) + e. Element 2·j + e of
// `max` and `sum` is that row's. A sum is over one warp's keys; the four warps' are added at the
// very end.
template <class Traits>
struct RowSums {
  static constexpr int kElements = Traits::kRows / 2;
  float out[Traits::kDimBlocks][kElements];
  float max[Traits::kColumns], sum[Traits::kColumns];

  static __device__ __forceinline__ constexpr int column_of(int element) {
    return element / 4 * 2 + element % 2;
  }

  // Of no key.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < Traits::kColumns; ++c) max[c] = -kInfinity, sum[c] = 0.f;
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kElements; ++i) out[b][i] = 0.f;
  }
};

// Merges `right` into `left`, or puts it there if nothing is there yet.
template <class Traits>
__device__ __forceinline__ void fold(RowSums<Traits>& left, const RowSums<Traits>& right,
                                     bool is_empty) {
  using Sums = RowSums<Traits>;
  if (is_empty) {
    left = right;
    return;
  }
  MergeWeights weights[Traits::kColumns];
#pragma unroll
  for (int c = 0; c < Traits::kColumns; ++c) {
    weights[c] = merge_max(left.max[c], right.max[c], Exp2{});
    left.sum[c] = merge_element(left.sum[c], right.sum[c], weights[c]);
  }
#pragma unroll
  for (int b = 0; b < Traits::kDimBlocks; ++b)
#pragma unroll
    for (int i = 0; i < Sums::kElements; ++i)
      left.out[b][i] = merge_element(left.out[b][i], right.out[b][i], weights[Sums::column_of(i)]);
}

// ---- the end of a row ----

__device__ __forceinline__ float sum_of_warps(const float (&sum)[4]) {
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Whether the call wants the largest scores of rows.
template <class Traits>
__device__ __forceinline__ bool wants_largest(const DecodeParams& params) {
  return Traits::kMaxLogits && params.rows.max_logits.data != nullptr;
}

struct RowResult {
  float inverse_sum;
  RowValues values;
};

// largest: the row's largest score, where the call wants it. Both that and max are in base 2.
__device__ __forceinline__ RowResult finish_row(const DecodeParams& params, float max, float sum,
                                                float largest, int head) {
  RowResult result = {inverse_of(sum), {lse_of(sum, [&] { return max; }), largest * kLn2}};
  if (params.sink.data != nullptr)
    add_sink(load_sink(params.sink, head), result.inverse_sum, result.values.lse);
  return result;
}

// A query row of an item: which query, from the item's first, and which head.
struct QueryRow {
  int query, head;
};
__device__ __forceinline__ QueryRow query_row(const DecodeParams& params, const DecodeRun& run,
                                              int row) {
  const int query = row / params.heads;
  return {query, run.head_group * params.heads + row - query * params.heads};
}

// A query row of the output.
template <class Traits>
struct OutRow {
  const DecodeParams& params;
  int64_t begin;

  __device__ __forceinline__ OutRow(const DecodeParams& p, const DecodeRun& run,
                                    const QueryRow& row)
      : params(p),
        begin(run.batch * p.out_stride_batch + int64_t(run.q_row + row.query) * p.out_stride_row +
              row.head * p.out_stride_head) {}

  __device__ __forceinline__ void store(int col, float x) const {
    if (col >= params.head_dim_v) return;
    if (params.out_float32) {
      static_cast<float*>(params.out)[begin + col] = x;
    } else {
      static_cast<uint16_t*>(params.out)[begin + col] =
          uint16_t(Traits::kFp8 && params.out_bfloat16 ? pack2<Element::kBFloat16>(x, 0.f)
                                                       : pack2<Traits::kElement>(x, 0.f));
    }
  }

  // Two columns that exist, col and col + 1, of 16-bit keys.
  __device__ __forceinline__ void store_pair(int col, float x, float y) const {
    if (params.out_float32) {
      float* const at = static_cast<float*>(params.out) + begin + col;
      at[0] = x, at[1] = y;
      return;
    }
    uint16_t* const at = static_cast<uint16_t*>(params.out) + begin + col;
    const uint32_t packed = pack2<Traits::kElement>(x, y);
    if (reinterpret_cast<unsigned long long>(at) % 4 == 0)
      *reinterpret_cast<uint32_t*>(at) = packed;
    else
      at[0] = uint16_t(packed), at[1] = uint16_t(packed >> 16);
  }
};

template <bool kMaxLogits>
__device__ __forceinline__ void store_values(const DecodeParams& params, const DecodeRun& run,
                                             const QueryRow& row, const RowValues& values) {
  store_row_values<kMaxLogits>(params.rows, run.batch, row.head, run.q_row + row.query, values);
}

// Stores the result of a consumer warpgroup's rows of a whole item, as store_partial. sums.sum is
// already that of all warps; largest: as finish_row has it.
template <class Traits>
__device__ __forceinline__ void store_result(const DecodeParams& params, const DecodeRun& run,
                                             const RowSums<Traits>& sums,
                                             const float (&largest)[Traits::kColumns],
                                             int first_row, int rows, int thread) {
  const int lane = thread % 32, dim = thread / 32 * 16;
#pragma unroll
  for (int c = 0; c < Traits::kColumns; ++c) {
    const int row = first_row + c / 2 * 8 + lane % 4 * 2 + c % 2;
    if (row >= rows) continue;
    const QueryRow at = query_row(params, run, row);
    const RowResult result = finish_row(params, sums.max[c], sums.sum[c], largest[c], at.head);
    const OutRow<Traits> out(params, run, at);
#pragma unroll
    for (int b = 0; b < Traits::kDimBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        out.store(64 * b + dim + Traits::dim_of(lane / 4, h),
                  sums.out[b][c / 2 * 4 + 2 * h + c % 2] * result.inverse_sum);
    if (thread < 4) store_values<Traits::kMaxLogits>(params, run, at, result.values);
  }
}

}  // namespace flash3::cuda::sm90
