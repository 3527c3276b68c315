// SPDX-License-Identifier: Apache-2.0
// Brings 16-bit queries of an item into shared memory.
#pragma once

#include "cuda/device/score/tree_mask.cuh"
#include "cuda/sm90/decode/fold.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

__device__ __forceinline__ int64_t q_offset(const DecodeParams& params, const DecodeRun& run,
                                            const QueryRow& at) {
  return run.batch * params.q_stride_batch + int64_t(run.q_row + at.query) * params.q_stride_row +
         at.head * params.q_stride_head;
}

// What a query of the item sees; with a tree mask, its bits.
__device__ __forceinline__ RowKeys row_keys(const DecodeParams& params, const DecodeRun& run,
                                            int query) {
  if (params.tree == nullptr) return keys_of_row<true>(run.mask, run.k_length, run.query + query);
  const unsigned long long bits =
      params.tree[run.batch * params.tree_stride_batch + run.q_row + query];
  return {int(bits), int(bits >> 32)};
}

// Masks scores that the mask's edge runs through; rows(r) is what row_keys() made of the view's
// row.
template <class View, class Rows>
__device__ __forceinline__ void mask_decode_scores(const DecodeParams& params, const DecodeRun& run,
                                                   const View& view, typename View::Scores& r_s,
                                                   const Rows& rows) {
  if (params.tree == nullptr) return RangeMask<Rows>{rows}.apply(view, r_s);
  const auto words = [&](int r) {
    const RowKeys& word = rows(r);
    return KeyBits{unsigned(word.first), unsigned(word.end)};
  };
  TreeMask<decltype(words)>{words, run.mask.row_shift, run.k_length}.apply(view, r_s);
}

// Keys that no query sees have weight 0, but 0 · NaN is NaN: clears their values in a tile, which
// `threads` threads share. They have waited for V when wait() returns, and sync() ends it.
template <class Traits, class Wait, class Sync>
__device__ __forceinline__ void clear_hidden_values(const DecodeRun& run, int first_key,
                                                    uint8_t* tile, int thread, int threads,
                                                    const Wait& wait, const Sync& sync) {
  using VTile = typename Traits::VTile;
  constexpr int kPieces = VTile::kRowBytes / 16;
  const int begin = run.keys.begin - first_key, end = run.keys.end - first_key;
  if (begin <= 0 && end >= Traits::kTileN) return;
  wait();
  for (int i = thread; i < Traits::kTileN * kPieces; i += threads) {
    const int row = i / kPieces;
    if (row >= begin && row < end) continue;
#pragma unroll
    for (int chunk = 0; chunk < VTile::kChunks; ++chunk)
      *reinterpret_cast<uint4*>(tile + chunk * VTile::kChunkBytes + i * 16) = {};
  }
  fence_shared_for_async_proxy();
  sync();
}

// What the rows of a consumer warpgroup see; those that do not exist see what the item's first
// does.
template <class Traits>
__device__ __forceinline__ void load_row_keys(const DecodeParams& params, const DecodeRun& run,
                                              typename Traits::Shared& shared, int consumer,
                                              int thread) {
  if (thread >= Traits::kRows) return;
  const int row = consumer * Traits::kRows + thread;
  shared.row_keys[consumer][thread] =
      row_keys(params, run, row < run.rows ? row / params.heads : 0);
}

// Q of a consumer warpgroup's rows, and what they see; rows that do not exist are 0.
template <class Traits>
__device__ __forceinline__ void load_queries(const DecodeParams& params, const DecodeRun& run,
                                             typename Traits::Shared& shared, int consumer,
                                             int thread) {
  using QTile = typename Traits::QTile;
  constexpr int kPieces = QTile::kCols / QTile::kPiece;
  const int first_row = consumer * Traits::kRows, rows = run.rows - first_row;
#pragma unroll 1
  for (int i = thread; i < Traits::kRows * kPieces; i += kWarpgroupThreads) {
    const int row = i / kPieces, col = i % kPieces * QTile::kPiece;
    uint4 piece = {};
    if (row < rows && col < params.head_dim) {
      const QueryRow at = query_row(params, run, first_row + row);
      const unsigned short* from =
          static_cast<const unsigned short*>(params.q) + q_offset(params, run, at);
      piece = params.q_by_pieces ? *reinterpret_cast<const uint4*>(from + col)
                                 : load_piece(from, col, params.head_dim);
    }
    *reinterpret_cast<uint4*>(shared.q[consumer] + QTile::offset(row, col)) = piece;
  }
  load_row_keys<Traits>(params, run, shared, consumer, thread);
  fence_shared_for_async_proxy();
}

}  // namespace flash3::cuda::sm90
