// SPDX-License-Identifier: Apache-2.0
// The producers: K and V of the block's runs, tile by tile, through a ring each. Where the rows of
// a tile lie in pieces of params.box_rows (a whole tile, or the boxes of pages) one warp has
// the copy engine bring them; otherwise three gather them row by row.
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
    tma_load_once(tile + c * Tile::kChunkBytes + at_row * Tile::kRowBytes, map, at, full);
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
    // Where the next tile's box lies is asked for before this one's copies are issued.
    const auto place_of_box = [&](int tile) {
      return has_box && tile < tiles.end ? place_of_key(params, run, tile * Traits::kTileN + at_row)
                                         : KeyPlace{};
    };
    KeyPlace next = place_of_box(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const KeyPlace row = next;
      next = place_of_box(tile + 1);
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

// The rows of a tile that a warp gathers: lane l knows where rows first + 32·g + l lie in K and V.
template <int kTileN>
struct GatheredRows {
  static constexpr int kOfWarp = (kTileN + kLoaderWarps - 1) / kLoaderWarps;
  static constexpr int kGroups = (kOfWarp + 31) / 32;
  const unsigned short *k[kGroups], *v[kGroups];

  __device__ __forceinline__ void find(const DecodeParams& params, const DecodeRun& run,
                                       int first_key) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const KeyPlace at = place_of_key(params, run, first_key + 32 * g + int(threadIdx.x % 32));
      k[g] = row_of(params.k_rows, at, run.kv_head);
      v[g] = row_of(params.v_rows, at, run.kv_head);
    }
  }

 private:
  static __device__ __forceinline__ const unsigned short* row_of(const CacheView& view,
                                                                 const KeyPlace& at, int head) {
    return view.data + at.element * view.stride_element + at.row * view.stride_row +
           head * view.stride_head;
  }
};

// Copies a warp's rows of a tile, as many at once as fill the lanes with pieces of 16 bytes, and
// arrives when they are there. sources: GatheredRows'.
template <class Tile, int kGroups>
__device__ __forceinline__ void gather(const unsigned short* const (&sources)[kGroups], int first,
                                       const CacheView& view, uint8_t* tile, uint64_t* full) {
  constexpr int kPieces = Tile::kCols / Tile::kPiece, kAtOnce = 32 / kPieces;
  static_assert(kAtOnce >= 1);
  const int lane = threadIdx.x % 32,
            end = min(first + GatheredRows<Tile::kRows>::kOfWarp, Tile::kRows);
  const int col = lane % kPieces * Tile::kPiece, in_step = lane / kPieces;
  const bool by_pieces = view.by_pieces;
  const int bytes = col < view.dim ? 16 : 0, from_col = by_pieces ? min(col, view.dim - 8) : 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll 4
    for (int i = 0; i < 32; i += kAtOnce) {
      const unsigned short* const source = reinterpret_cast<const unsigned short*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(sources[g]), i + in_step));
      const int row = first + 32 * g + i + in_step;
      if (row >= end || in_step >= kAtOnce) continue;
      uint8_t* const to = tile + Tile::offset(row, col);
      if (by_pieces)
        copy_async_16(to, source + from_col, bytes);
      else
        *reinterpret_cast<uint4*>(to) = load_piece(source, col, view.dim);
    }
  }
  if (by_pieces)
    arrive_behind_copies(full);
  else
    arrive(full);
}

// By three warps, each with its rows of every tile.
template <class Traits>
__device__ __forceinline__ void load_by_rows(const DecodeParams& params,
                                             typename Traits::Shared& shared) {
  using Rows = GatheredRows<Traits::kTileN>;
  const int first = warp_in_warpgroup() * Rows::kOfWarp;
  typename Traits::KvState state;
  for (RunReader runs(shared.runs); runs.next(); runs.release()) {
    const DecodeRun& run = runs.run();
    const TileMask::Range tiles = run.tiles;
    Rows next;
    if (!tiles.empty()) next.find(params, run, tiles.begin * Traits::kTileN + first);
    for (int tile = tiles.begin; tile < tiles.end; ++tile, state.advance()) {
      const Rows rows = next;
      if (tile + 1 < tiles.end) next.find(params, run, (tile + 1) * Traits::kTileN + first);
      const int stage = state.stage;
      wait(&shared.k_barriers.empty[stage], state.phase ^ 1, "k_empty");
      gather<typename Traits::KTile>(rows.k, first, params.k_rows, shared.k[stage],
                                     &shared.k_barriers.full[stage]);
      wait(&shared.v_barriers.empty[stage], state.phase ^ 1, "v_empty");
      gather<typename Traits::VTile>(rows.v, first, params.v_rows, shared.v[stage],
                                     &shared.v_barriers.full[stage]);
    }
  }
}

// By the loaders' warps.
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
