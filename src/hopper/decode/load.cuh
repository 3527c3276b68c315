// SPDX-License-Identifier: Apache-2.0
// The producers: K and V of the block's runs, tile by tile, through a ring each. Where the rows of
// a tile lie in pieces of params.box_rows (a whole tile, or the boxes of pages) one warp has the
// copy engine bring them; otherwise three gather them row by row.
#pragma once

#include "hopper/decode/traits.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

// Warps of the producers that gather; the last one is the scheduler.
inline constexpr int kLoaderWarps = 3, kLoaderThreads = 32 * kLoaderWarps;

// Where a key lies: in which element of K and V, and in which of its rows.
struct KeyPlace {
  int element, row;
};

// Keys behind the last one are in no page: they get that one's.
__device__ __forceinline__ KeyPlace place_of_key(const DecodeParams& params, const DecodeRun& run,
                                                 int key) {
  const int place = run.k_first + max(min(key, run.k_length - 1), 0);
  if (params.k_packed) return {0, place};
  if (params.page_table == nullptr) {
    const int element = params.batch_idx != nullptr ? params.batch_idx[run.batch] : run.batch;
    return {clamped(element, 0, params.elements - 1), place};
  }
  const int number = place / params.page_size;
  const int page = params.page_table[run.batch * params.page_table_stride + number];
  return {clamped(page, 0, params.elements - 1), place - number * params.page_size};
}

// Loads a box of rows of a tile, chunk by chunk, from row 8·n of it on.
template <class Tile>
__device__ __forceinline__ void load_rows(uint8_t* tile, int at_row, const TensorMap* map,
                                          const KeyPlace& place, int head, uint64_t* full) {
  BoxAt at{0, head, place.row, place.element, false};
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
    at.dim = c * Tile::kChunk;
    tma_load(tile + c * Tile::kChunkBytes + at_row * Tile::kRowBytes, map, at, full);
  }
}

// One warp: each lane has one box of a tile, where there are so many.
template <class Traits>
__device__ __forceinline__ void load_by_boxes(const DecodeParams& params,
                                              typename Traits::Shared& shared) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  const int lane = threadIdx.x % 32, at_row = lane * params.box_rows;
  const bool has_box = at_row < Traits::kTileN;
  typename Traits::KvState state;
  prefetch(&params.k);
  prefetch(&params.v);
  for (RunReader runs(shared.runs); runs.next(); runs.release()) {
    const DecodeRun& run = runs.run();
    const TileMask::Range tiles = run.tiles;
    const int head = run.kv_head;
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const KeyPlace row = has_box ? place_of_key(params, run, tile * Traits::kTileN + at_row)
                                   : KeyPlace{};
      const int stage = state.stage;
      wait(&shared.k_barriers.empty[stage], state.phase ^ 1, "k_empty");
      if (lane == 0) arrive_expect_bytes(&shared.k_barriers.full[stage], KTile::kBytes);
      __syncwarp();
      if (has_box)
        load_rows<KTile>(shared.k[stage], at_row, &params.k, row, head,
                         &shared.k_barriers.full[stage]);
      wait(&shared.v_barriers.empty[stage], state.phase ^ 1, "v_empty");
      if (lane == 0) arrive_expect_bytes(&shared.v_barriers.full[stage], VTile::kBytes);
      __syncwarp();
      if (has_box)
        load_rows<VTile>(shared.v[stage], at_row, &params.v, row, head,
                         &shared.v_barriers.full[stage]);
      state.advance();
    }
  }
}

// The rows of a tile, by all loaders; arrives when they are there.
template <class Tile>
__device__ __forceinline__ void gather_rows(const DecodeParams& params, const DecodeRun& run,
                                            const CacheView& from, int first_key,
                                            uint8_t* tile, uint64_t* full) {
  constexpr int kPieces = Tile::kCols / Tile::kPiece;
  for (int i = threadIdx.x; i < Tile::kRows * kPieces; i += kLoaderThreads) {
    const int row = i / kPieces, col = i % kPieces * Tile::kPiece;
    uint8_t* to = tile + Tile::offset(row, col);
    const KeyPlace at = place_of_key(params, run, first_key + row);
    const unsigned short* source = from.data + at.element * from.stride_element +
                                   at.row * from.stride_row +
                                   run.kv_head * from.stride_head;
    if (from.by_pieces)
      copy_async_16(to, source + min(col, from.dim - 8), col < from.dim ? 16 : 0);
    else
      *reinterpret_cast<uint4*>(to) = load_piece(source, col, from.dim);
  }
  if (from.by_pieces)
    arrive_behind_copies(full);
  else
    arrive(full);
}

// By the other warps.
template <class Traits>
__device__ __forceinline__ void load_by_rows(const DecodeParams& params,
                                             typename Traits::Shared& shared) {
  typename Traits::KvState state;
  for (RunReader runs(shared.runs); runs.next(); runs.release()) {
    const DecodeRun& run = runs.run();
    const TileMask::Range tiles = run.tiles;
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int stage = state.stage, key = tile * Traits::kTileN;
      wait(&shared.k_barriers.empty[stage], state.phase ^ 1, "k_empty");
      gather_rows<typename Traits::KTile>(params, run, params.k_rows, key, shared.k[stage],
                                          &shared.k_barriers.full[stage]);
      wait(&shared.v_barriers.empty[stage], state.phase ^ 1, "v_empty");
      gather_rows<typename Traits::VTile>(params, run, params.v_rows, key, shared.v[stage],
                                          &shared.v_barriers.full[stage]);
      state.advance();
    }
  }
}

template <class Traits>
__device__ __forceinline__ void load_keys(const DecodeParams& params,
                                          typename Traits::Shared& shared) {
  if (params.box_rows == 0) {
    load_by_rows<Traits>(params, shared);
  } else if (threadIdx.x < 32) {
    load_by_boxes<Traits>(params, shared);
  }
}

}  // namespace flash3::hopper
