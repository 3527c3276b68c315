// SPDX-License-Identifier: Apache-2.0
// Brings 16-bit queries of an item into shared memory.
#pragma once

#include "hopper/decode/fold.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

__device__ __forceinline__ int64_t q_offset(const DecodeParams& params, const DecodeRun& run,
                                            const QueryRow& at) {
  return run.batch * params.q_stride_batch + int64_t(run.q_row + at.query) * params.q_stride_row +
         at.head * params.q_stride_head;
}

// What the rows of the item see; those that do not exist see what the first does.
template <class Traits>
__device__ __forceinline__ void load_row_keys(const DecodeParams& params, const DecodeRun& run,
                                              typename Traits::Shared& shared, int thread) {
  if (thread >= Traits::kRows) return;
  const int query = thread < run.rows ? thread / params.heads : 0;
  shared.row_keys[thread] = keys_of_row<true>(run.mask, run.k_length, run.query + query);
}

// Q of the item, and what its rows see; rows that do not exist are 0.
template <class Traits>
__device__ __forceinline__ void load_queries(const DecodeParams& params, const DecodeRun& run,
                                             typename Traits::Shared& shared, int thread) {
  using QTile = typename Traits::QTile;
  constexpr int kPieces = QTile::kCols / QTile::kPiece;
  const int rows = run.rows;
#pragma unroll 1
  for (int i = thread; i < Traits::kRows * kPieces; i += kWarpgroupThreads) {
    const int row = i / kPieces, col = i % kPieces * QTile::kPiece;
    uint4 piece = {};
    if (row < rows && col < params.head_dim) {
      const QueryRow at = query_row(params, run, row);
      const unsigned short* from =
          static_cast<const unsigned short*>(params.q) + q_offset(params, run, at);
      piece = params.q_by_pieces ? *reinterpret_cast<const uint4*>(from + col)
                                 : load_piece(from, col, params.head_dim);
    }
    *reinterpret_cast<uint4*>(shared.q + QTile::offset(row, col)) = piece;
  }
  load_row_keys<Traits>(params, run, shared, thread);
  fence_shared_for_async_proxy();
}

}  // namespace flash3::hopper
