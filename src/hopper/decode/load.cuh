// SPDX-License-Identifier: Apache-2.0
// The producers: K and V of the block's runs, tile by tile, through a ring each. Where the rows of
// a tile lie in pieces of params.box_rows (a whole tile, or the boxes of pages) one warp has
// the copy engine bring them; otherwise two gather them row by row.
#pragma once

#include "hopper/decode/traits.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

// Warps of the producers that gather, each half of a tile.
inline constexpr int kLoaderWarps = 2, kLoaderThreads = 32 * kLoaderWarps;

// Where a key lies: in which element of K and V, as the caller's tables say, and in which of its
// rows. Tables may say what is no element: whoever loads asks element_of.
struct KeyPlace {
  int element, row;
};

__device__ __forceinline__ int element_of(const DecodeParams& params, const KeyPlace& place) {
  return clamped(place.element, 0, params.elements - 1);
}

// Keys behind the last one are in no page: they get that one's.
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

// Loads a box of rows of a tile, chunk by chunk, from row 8·n of it on.
template <class Tile>
__device__ __forceinline__ void load_rows(uint8_t* tile, int at_row, const TensorMap* map,
                                          int element, int row, int head, uint64_t* full) {
  BoxAt at{0, head, row, element, false};
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
      const int element = element_of(params, next), row = next.row;
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

// Where a row of a cache begins. [elements, rows, heads, dim]
__device__ __forceinline__ const unsigned short* row_of(const CacheView& view, int element, int row,
                                                        int head) {
  return view.data + element * view.stride_element + row * view.stride_row +
         head * view.stride_head;
}

// What lane `from` has.
__device__ __forceinline__ const unsigned short* of_lane(const unsigned short* row, int from) {
  return reinterpret_cast<const unsigned short*>(
      __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), from));
}

// The rows of a tile that a warp gathers.
template <class Tile>
struct GatheredRows {
  static constexpr int kPieces = Tile::kCols / Tile::kPiece;  // of 16 bytes, a lane each
  static constexpr int kAtOnce = 32 / kPieces;
  static constexpr int kCount = Tile::kRows / kLoaderWarps;
  static constexpr int kGroups = ceil_div(kCount, 32);  // a lane knows where one row of each is
  static constexpr int kSteps = 8 / kAtOnce;            // then the swizzle repeats
  static_assert(kAtOnce >= 1 && 8 % kAtOnce == 0 && kCount % 32 == 0);

  static __device__ __forceinline__ int first() { return warp_in_warpgroup() * kCount; }
};

// A warp copies rows first… of a tile, as many at once as fill the lanes, and arrives when they are
// there. sources: of rows first + lane, first + 32 + lane, ….
template <class Tile, int kGroups>
__device__ __forceinline__ void gather(const unsigned short* const (&sources)[kGroups],
                                       const CacheView& view, uint8_t* tile, uint64_t* full) {
  using Rows = GatheredRows<Tile>;
  const int lane = threadIdx.x % 32, col = lane % Rows::kPieces * Tile::kPiece;
  const int in_step = lane / Rows::kPieces;
  const bool copies = in_step < Rows::kAtOnce;  // lanes too many do not
  if (view.by_pieces) {
    const int bytes = col < view.dim ? 16 : 0, from_col = min(col, view.dim - 8);
    // A warp leaves a copy about as fast as it has its address: without a branch, and with what
    // repeats computed before. More than eight rows in a row take long to fetch.
    uint8_t* to[Rows::kSteps];
#pragma unroll
    for (int s = 0; s < Rows::kSteps; ++s)
      to[s] = tile + Tile::offset(Rows::first() + s * Rows::kAtOnce + in_step, col);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll 1
      for (int i = 0; i < 32; i += 8)
#pragma unroll
        for (int s = 0; s < Rows::kSteps; ++s) {
          const unsigned short* const source =
              of_lane(sources[g], i + s * Rows::kAtOnce + in_step);  // by all lanes
          if (copies)
            copy_async_16(to[s] + (32 * g + i) * Tile::kRowBytes, source + from_col, bytes);
        }
    arrive_behind_copies(full);
  } else {
#pragma unroll 1
    for (int i = 0; i < Rows::kCount; i += Rows::kAtOnce) {
      const unsigned short* const source =
          of_lane(i < 32 ? sources[0] : sources[kGroups - 1], i % 32 + in_step);
      if (copies)
        *reinterpret_cast<uint4*>(tile + Tile::offset(Rows::first() + i + in_step, col)) =
            load_piece(source, col, view.dim);
    }
    arrive(full);
  }
}

// By two warps, each with its rows of every tile.
template <class Traits>
__device__ __forceinline__ void load_by_rows(const DecodeParams& params,
                                             typename Traits::Shared& shared) {
  using KRows = GatheredRows<typename Traits::KTile>;
  using VRows = GatheredRows<typename Traits::VTile>;
  constexpr int kGroups = KRows::kGroups;
  static_assert(KRows::kCount == VRows::kCount);
  const int at_row = KRows::first() + threadIdx.x % 32;
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
      const unsigned short *k[kGroups], *v[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int element = element_of(params, next[g]);
        k[g] = row_of(params.k_rows, element, next[g].row, head);
        v[g] = row_of(params.v_rows, element, next[g].row, head);
      }
      find_rows(tile + 1);
      const int stage = state.stage;
      wait(&shared.k_barriers.empty[stage], state.phase ^ 1, "k_empty");
      gather<typename Traits::KTile>(k, params.k_rows, shared.k[stage],
                                     &shared.k_barriers.full[stage]);
      wait(&shared.v_barriers.empty[stage], state.phase ^ 1, "v_empty");
      gather<typename Traits::VTile>(v, params.v_rows, shared.v[stage],
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
