// SPDX-License-Identifier: Apache-2.0
// Items that several blocks share: who is the last to have left its parts, and merges them all.
#pragma once

#include "hopper/decode/fold.cuh"

namespace flash3::hopper {

// Arrivals at a shared item are counted in the cell of the first block that shares it: the launch's
// ticket, and in its low bits how many. All blocks run at the same time: each opens its cell when
// it begins, and whoever is the last there closes it, or the block itself if nobody comes, so that
// a replay of a captured launch, which has the same ticket, finds it closed.
inline constexpr unsigned long long kArrivalBits = 0xffff;

__device__ __forceinline__ void open_cell(const DecodeParams& params) {
  if (params.slots > 0) store_release(&params.arrivals[blockIdx.x], params.ticket);
}
__device__ __forceinline__ void close_cell(const DecodeParams& params, int block) {
  if (params.slots > 0) params.arrivals[block] = 0;
}

// True if all other sharers have arrived before. By one thread, behind the block's writes.
__device__ __forceinline__ bool arrive_at_item(const DecodeParams& params, const DecodeRun& run) {
  unsigned long long* const cell = &params.arrivals[run.first_block];
  unsigned long long seen = add_acquire_release(cell, 1);
  if ((seen & ~kArrivalBits) != params.ticket) {  // not open yet: that did not count
    wait_until([&] { return (load_acquire(cell) & ~kArrivalBits) == params.ticket; }, "item_open",
               run.first_block);
    seen = add_acquire_release(cell, 1);
  }
  return int(seen & kArrivalBits) + 1 == run.sharers;
}

// Four head dims of a row of a part, with the row's sums and max.
struct PartQuad {
  float4 out, sum;
  float max;
};

template <class Traits>
__device__ __forceinline__ PartQuad load_quad(const DecodeParams& params, int entry, int row,
                                              int col) {
  const float* part = params.parts + int64_t(entry & ~kEndsFold) * Traits::kPartFloats;
  const float* of_row = part + Traits::kRows * Traits::kHeadDimV + kRowFloats * row;
  return {__ldcg(reinterpret_cast<const float4*>(part + row * Traits::kHeadDimV + col)),
          __ldcg(reinterpret_cast<const float4*>(of_row)), __ldcg(of_row + 4)};
}

__device__ __forceinline__ float4 fold_elements(const float4& x, const float4& y,
                                                const FoldFactors& factors) {
  return {fold_element(x.x, y.x, factors), fold_element(x.y, y.y, factors),
          fold_element(x.z, y.z, factors), fold_element(x.w, y.w, factors)};
}

// The same, merged over parts.
struct MergedQuad {
  float4 out = {}, sum = {};
  float max = -kInfinity;
  bool is_empty = true;

  __device__ __forceinline__ void add(const PartQuad& x) {
    if (is_empty) {
      out = x.out, sum = x.sum, max = x.max;
      is_empty = false;
      return;
    }
    const FoldFactors factors = fold_max(max, x.max);
    out = fold_elements(out, x.out, factors);
    sum = fold_elements(sum, x.sum, factors);
  }
};

// Merges the parts on the list and stores the item. By all consumers.
template <class Traits>
__device__ __forceinline__ void merge_parts(const DecodeParams& params, const DecodeRun& run,
                                            const int* list, int thread) {
  const int rows = run.rows, count = run.parts;
  constexpr int kQuads = Traits::kHeadDimV / 4, kAtOnce = 8;
  for (int i = thread; i < rows * kQuads; i += kWarpgroupThreads) {
    const int row = i / kQuads, col = i % kQuads * 4;
    MergedQuad fold, all;
#pragma unroll 1
    for (int n0 = 0; n0 < count; n0 += kAtOnce) {
      PartQuad quads[kAtOnce];  // all of them on their way before the first is needed
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        quads[n] = load_quad<Traits>(params, list[min(n0 + n, count - 1)], row, col);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (n0 + n >= count) break;
        fold.add(quads[n]);
        if ((list[n0 + n] & kEndsFold) == 0) continue;
        all.add({fold.out, fold.sum, fold.max});
        fold.is_empty = true;
      }
    }
    const QueryRow at = query_row(params, run, row);
    const RowResult result = finish_row(
        params, all.max, sum_of_warps({all.sum.x, all.sum.y, all.sum.z, all.sum.w}), at.head);
    unsigned short* out = out_row(params, run, at);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (col + e < params.head_dim_v)
        out[col + e] = rounded<Traits::kElement>((&all.out.x)[e] * result.inverse_sum);
    if (col == 0) store_row_lse(params, run, at, result.lse);
  }
}

}  // namespace flash3::hopper
