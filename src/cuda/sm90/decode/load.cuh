// SPDX-License-Identifier: Apache-2.0
// The producers. They bring K and V of the block's runs, tile by tile, through a ring each. Where a
// tile consists of boxes of params.box_rows rows (the whole tile, or boxes of pages), one warp lets
// the copy engine bring them. Otherwise two warps gather them row by row.
#pragma once

#include "cuda/device/ptx/async_copies.cuh"
#include "cuda/sm90/decode/traits.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// So many warps gather; each has half of a tile.
inline constexpr int kLoaderWarps = 2, kLoaderThreads = 32 * kLoaderWarps;

// Where a key lies: in which element of K and V, by the caller's tables, and in which of its rows.
// Tables may hold what is no element, so whoever loads asks batch_element().
struct KeyPlace {
  int element, row;
};

__device__ __forceinline__ int batch_element(const DecodeParams& params, const KeyPlace& place) {
  return clamped(place.element, 0, params.elements - 1);
}

// Keys after the last one lie in no page: they get the place of the last one.
__device__ __forceinline__ KeyPlace place_of_key(const DecodeParams& params, const DecodeRun& run,
                                                 int key) {
  const int place = run.k_first + max(min(key, run.k_length - 1), 0);
  if (params.k_packed) return {0, place};
  if (params.page_table == nullptr) {
    const int element = params.batch_idx != nullptr ? params.batch_idx[run.batch] : run.batch;
    return {element, place};
  }
  const int number = place / params.page_size;
  return {params.page_table[run.batch * params.page_table_stride + number],
          place - number * params.page_size};
}

// Loads a box of rows into a tile, chunk by chunk, from the tile's row at_row on, a multiple of 8.
template <class Tile>
__device__ __forceinline__ void load_rows(uint8_t* tile, int at_row, const TensorMap* map,
                                          int element, int row, int head, uint64_t* full) {
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c)
    copy_box_in_once(tile + c * Tile::kChunkBytes + at_row * Tile::kRowBytes, map,
                     {c * Tile::kChunk, head, row, element}, full);
}

// One warp calls it: each lane has one box of a tile, as far as there are boxes.
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
    // The place of the next tile's box is looked up before this tile's copies are issued.
    const auto place_of_box = [&](int tile) {
      return has_box && tile < tiles.end ? place_of_key(params, run, tile * Traits::kTileN + at_row)
                                         : KeyPlace{};
    };
    KeyPlace next = place_of_box(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int element = batch_element(params, next), row = next.row;
      next = place_of_box(tile + 1);
      const int stage = state.stage;
      wait(&shared.k_barriers.empty[stage], state.phase ^ 1, "k_empty");
      if (lane == 0) arrive_expect_bytes(&shared.k_barriers.full[stage], KTile::kBytes);
      __syncwarp();
      if (has_box)
        load_rows<KTile>(shared.k[stage], at_row, &params.k, element, row, head,
                         &shared.k_barriers.full[stage]);
      wait(&shared.v_barriers.empty[stage], state.phase ^ 1, "v_empty");
      if (lane == 0) arrive_expect_bytes(&shared.v_barriers.full[stage], VTile::kBytes);
      __syncwarp();
      if (has_box)
        load_rows<VTile>(shared.v[stage], at_row, &params.v, element, row, head,
                         &shared.v_barriers.full[stage]);
      state.advance();
    }
  }
}

// Where a row of a cache [elements, rows, heads, dim] begins. Stored: unsigned integers as wide as
// an element.
template <class Stored>
__device__ __forceinline__ const Stored* row_of(const CacheView& view, int element, int row,
                                                int head) {
  return static_cast<const Stored*>(view.data) + element * view.stride_element +
         row * view.stride_row + head * view.stride_head;
}

// The row that lane `from` has.
template <class Stored>
__device__ __forceinline__ const Stored* of_lane(const Stored* row, int from) {
  return reinterpret_cast<const Stored*>(
      __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), from));
}

// The rows of a tile that a warp gathers.
template <class Tile>
struct GatheredRows {
  static constexpr int kAll = Tile::kCols / Tile::kPiece;  // pieces of 16 bytes of a row
  static constexpr int kPieces = kAll < 32 ? kAll : 32;    // at once, a lane each
  static constexpr int kPasses = kAll / kPieces;           // over all rows
  static constexpr int kAtOnce = 32 / kPieces;             // rows
  static constexpr int kCount = Tile::kRows / kLoaderWarps;
  static constexpr int kGroups = ceil_div(kCount, 32);  // a lane knows a row's place in each
  static constexpr int kSteps = 8 / kAtOnce;            // the swizzle repeats after eight rows
  static_assert(kAll % kPieces == 0 && 8 % kAtOnce == 0 && kCount % 32 == 0);
};

// A warp copies its rows of a tile, as many at once as fill the lanes. sources: where the rows
// first
// + lane, first + 32 + lane, … begin; first_col: of this pass.
template <class Tile, class Stored, int kGroups>
__device__ __forceinline__ void gather_pass(const Stored* const (&sources)[kGroups], int first,
                                            int first_col, const CacheView& view, uint8_t* tile) {
  using Rows = GatheredRows<Tile>;
  const int lane = threadIdx.x % 32, col = first_col + lane % Rows::kPieces * Tile::kPiece;
  const int in_step = lane / Rows::kPieces;
  const bool copies = in_step < Rows::kAtOnce;  // false for lanes that have no row
  if (view.by_pieces) {
    const int bytes = col < view.dim ? 16 : 0, from_col = min(col, view.dim - Tile::kPiece);
    // Addresses bound the speed: this loop has no branch, and what repeats is computed before it.
    // Unrolled over more than eight rows it would take long to fetch.
    uint8_t* to[Rows::kSteps];
#pragma unroll
    for (int s = 0; s < Rows::kSteps; ++s)
      to[s] = tile + Tile::offset(first + s * Rows::kAtOnce + in_step, col);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll 1
      for (int i = 0; i < 32; i += 8)
#pragma unroll
        for (int s = 0; s < Rows::kSteps; ++s) {
          const Stored* const source =
              of_lane(sources[g], i + s * Rows::kAtOnce + in_step);  // by all lanes
          if (copies)
            copy_async_16(to[s] + (32 * g + i) * Tile::kRowBytes, source + from_col, bytes);
        }
  } else {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll 1
      for (int i = 0; i < 32; i += Rows::kAtOnce) {
        const Stored* const source = of_lane(sources[g], i + in_step);
        if (copies)
          *reinterpret_cast<uint4*>(tile + Tile::offset(first + 32 * g + i + in_step, col)) =
              load_piece(source, col, view.dim);
      }
  }
}

// Arrives when what the warp has copied so far is there.
__device__ __forceinline__ void arrive_gathered(const CacheView& view, uint64_t* full) {
  if (view.by_pieces)
    arrive_behind_copies(full);
  else
    arrive(full);
}

// A warp copies its rows of a tile, and arrives when they are there.
template <class Tile, class Stored, int kGroups>
__device__ __forceinline__ void gather(const Stored* const (&sources)[kGroups], int first,
                                       const CacheView& view, uint8_t* tile, uint64_t* full) {
  static_assert(GatheredRows<Tile>::kPasses == 1);
  gather_pass<Tile>(sources, first, 0, view, tile);
  arrive_gathered(view, full);
}

// Two warps call it; each has its rows of every tile.
template <class Traits>
__device__ __forceinline__ void load_by_rows(const DecodeParams& params,
                                             typename Traits::Shared& shared) {
  using Stored = typename Traits::Stored;
  using KRows = GatheredRows<typename Traits::KTile>;
  using VRows = GatheredRows<typename Traits::VTile>;
  constexpr int kGroups = KRows::kGroups;
  static_assert(KRows::kCount == VRows::kCount);
  const int first = warp_in_warpgroup() * KRows::kCount, at_row = first + threadIdx.x % 32;
  typename Traits::KvState state;
  for (RunReader runs(shared.runs); runs.next(); runs.release()) {
    const DecodeRun& run = runs.run();
    const TileMask::Range tiles = run.tiles;
    const int head = run.kv_head;
    KeyPlace next[kGroups];
    const auto find_rows = [&](int tile) {
      if (tile >= tiles.end) return;
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        next[g] = place_of_key(params, run, tile * Traits::kTileN + at_row + 32 * g);
    };
    find_rows(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile, state.advance()) {
      const Stored *k[kGroups], *v[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int element = batch_element(params, next[g]);
        k[g] = row_of<Stored>(params.k_rows, element, next[g].row, head);
        v[g] = row_of<Stored>(params.v_rows, element, next[g].row, head);
      }
      find_rows(tile + 1);
      const int stage = state.stage;
      wait(&shared.k_barriers.empty[stage], state.phase ^ 1, "k_empty");
      gather<typename Traits::KTile>(k, first, params.k_rows, shared.k[stage],
                                     &shared.k_barriers.full[stage]);
      wait(&shared.v_barriers.empty[stage], state.phase ^ 1, "v_empty");
      gather<typename Traits::VTile>(v, first, params.v_rows, shared.v[stage],
                                     &shared.v_barriers.full[stage]);
    }
  }
}

// The loaders' warps call it.
template <class Traits>
__device__ __forceinline__ void load_keys(const DecodeParams& params,
                                          typename Traits::Shared& shared) {
  if (params.box_rows == 0) {
    load_by_rows<Traits>(params, shared);
  } else if (threadIdx.x < 32) {
    load_by_boxes<Traits>(params, shared);
  }
}

}  // namespace flash3::cuda::sm90
