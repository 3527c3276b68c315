// SPDX-License-Identifier: Apache-2.0
// Brings the queries of an item into shared memory: the latent parts, then the rope parts.
#pragma once

#include "cuda/device/ptx/async_copies.cuh"
#include "cuda/sm90/decode/latent/traits.cuh"
#include "cuda/sm90/decode/queries.cuh"

namespace flash3::cuda::sm90 {

// Where the pieces of a query row lie.
struct LatentQuery {
  const unsigned short *latent, *rope;
};

__device__ __forceinline__ LatentQuery latent_query(const DecodeParams& params,
                                                    const DecodeRun& run, int row) {
  const QueryRow at = query_row(params, run, row);
  return {static_cast<const unsigned short*>(params.q_latent) +
              run.batch * params.q_latent_stride_batch +
              int64_t(run.q_row + at.query) * params.q_latent_stride_row +
              at.head * params.q_latent_stride_head,
          static_cast<const unsigned short*>(params.q) + q_offset(params, run, at)};
}

// Rows that do not exist are 0. All consumers call it; who reads Q waits for all of them.
template <class Traits>
__device__ __forceinline__ void load_latent_queries(const DecodeParams& params,
                                                    const DecodeRun& run,
                                                    typename Traits::Shared& shared, int thread) {
  using QTile = typename Traits::QTile;
  constexpr int kPieces = QTile::kCols / QTile::kPiece;
  const int rows = run.rows;
#pragma unroll 4
  for (int i = thread; i < Traits::kRows * kPieces; i += Traits::kThreads) {
    const int row = i / kPieces, col = i % kPieces * QTile::kPiece;
    uint8_t* const to = shared.q + QTile::offset(row, col);
    const LatentQuery from = latent_query(params, run, min(row, rows - 1));
    const bool is_rope = col >= Traits::kHeadDimV;
    const unsigned short* const piece =
        is_rope ? from.rope + (col - Traits::kHeadDimV) : from.latent + col;
    if (params.q_by_pieces)
      copy_async_16(to, piece, row < rows ? 16 : 0);
    else
      *reinterpret_cast<uint4*>(to) = row < rows ? load_piece(piece, 0, QTile::kPiece) : uint4{};
  }
  if (thread < Traits::kRows)
    shared.row_keys[thread] = row_keys(params, run, thread < rows ? thread / params.heads : 0);
  wait_for_async_copies();
  fence_shared_for_async_proxy();
}

}  // namespace flash3::cuda::sm90
