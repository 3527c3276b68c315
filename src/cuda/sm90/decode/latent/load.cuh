// SPDX-License-Identifier: Apache-2.0
// The latent kernel's producers: as those of the other decode kernels (decode/load.cuh), but that a
// tile's latent parts are announced in groups of head dims, so that the scores begin before all of
// them are there.
#pragma once

#include "cuda/sm90/decode/latent/traits.cuh"
#include "cuda/sm90/decode/load.cuh"

namespace flash3::cuda::sm90 {

// Loads a box of rows of the latent parts of a tile, each chunk for the barrier of its group. Other
// blocks read the same keys for other heads, so L2 keeps them.
template <class Traits>
__device__ __forceinline__ void load_latent_rows(uint8_t* tile, int at_row, const TensorMap* map,
                                                 BoxAt at, uint64_t* full) {
  using VTile = typename Traits::VTile;
#pragma unroll
  for (int c = 0; c < VTile::kChunks; ++c) {
    at.dim = c * VTile::kChunk;
    tma_load(tile + c * VTile::kChunkBytes + at_row * VTile::kRowBytes, map, at,
             full + at.dim / Traits::kGroupDims);
  }
}

// One warp calls it: each lane has one box of a tile, as far as there are boxes.
template <class Traits>
__device__ __forceinline__ void load_latent_by_boxes(const DecodeParams& params,
                                                     typename Traits::Shared& shared) {
  using KTile = typename Traits::KTile;
  const int lane = threadIdx.x % 32, at_row = lane * params.box_rows;
  const bool has_box = at_row < Traits::kTileN;
  typename Traits::KvState state;
  prefetch(&params.k);
  prefetch(&params.v);
  for (RunReader runs(shared.runs); runs.next(); runs.release()) {
    const DecodeRun& run = runs.run();
    const TileMask::Range tiles = run.tiles;
    // The place of the next tile's box is looked up before this tile's copies are issued.
    const auto place_of_box = [&](int tile) {
      return has_box && tile < tiles.end ? place_of_key(params, run, tile * Traits::kTileN + at_row)
                                         : KeyPlace{};
    };
    KeyPlace next = place_of_box(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile, state.advance()) {
      const BoxAt at{0, run.kv_head, next.row, batch_element(params, next), false};
      next = place_of_box(tile + 1);
      const int stage = state.stage;
      wait(&shared.empty[stage], state.phase ^ 1, "empty");
      uint64_t* const k_full = &shared.k_full[stage];
      if (lane == 0) arrive_expect_bytes(k_full, KTile::kBytes);
      if (lane < Traits::kGroups)
        arrive_expect_bytes(&shared.v_full[stage][lane], Traits::kGroupBytes);
      __syncwarp();
      if (!has_box) continue;
      tma_load(shared.k[stage] + at_row * KTile::kRowBytes, &params.k, at, k_full);
      load_latent_rows<Traits>(shared.v[stage], at_row, &params.v, at, shared.v_full[stage]);
    }
  }
}

// Two warps call it; each has its rows of every tile.
template <class Traits>
__device__ __forceinline__ void load_latent_by_rows(const DecodeParams& params,
                                                    typename Traits::Shared& shared) {
  using Stored = typename Traits::Stored;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using VRows = GatheredRows<VTile>;
  constexpr int kOfPass = Traits::kGroups / VRows::kPasses;
  static_assert(VRows::kGroups == 1);
  const int first = warp_in_warpgroup() * VRows::kCount, at_row = first + threadIdx.x % 32;
  typename Traits::KvState state;
  for (RunReader runs(shared.runs); runs.next(); runs.release()) {
    const DecodeRun& run = runs.run();
    const TileMask::Range tiles = run.tiles;
    const int head = run.kv_head;
    const auto place_of_row = [&](int tile) {
      return tile < tiles.end ? place_of_key(params, run, tile * Traits::kTileN + at_row)
                              : KeyPlace{};
    };
    KeyPlace next = place_of_row(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile, state.advance()) {
      const int element = batch_element(params, next);
      const Stored* const k[1] = {row_of<Stored>(params.k_rows, element, next.row, head)};
      const Stored* const v[1] = {row_of<Stored>(params.v_rows, element, next.row, head)};
      next = place_of_row(tile + 1);
      const int stage = state.stage;
      wait(&shared.empty[stage], state.phase ^ 1, "empty");
      gather<KTile>(k, first, params.k_rows, shared.k[stage], &shared.k_full[stage]);
#pragma unroll 1
      for (int pass = 0; pass < VRows::kPasses; ++pass) {
        gather_pass<VTile>(v, first, pass * VRows::kPieces * VTile::kPiece, params.v_rows,
                           shared.v[stage]);
#pragma unroll
        for (int i = 0; i < kOfPass; ++i)
          arrive_gathered(params.v_rows, &shared.v_full[stage][pass * kOfPass + i]);
      }
    }
  }
}

// The loaders' warps call it.
template <class Traits>
__device__ __forceinline__ void load_latent_keys(const DecodeParams& params,
                                                 typename Traits::Shared& shared) {
  if (params.box_rows == 0) {
    load_latent_by_rows<Traits>(params, shared);
  } else if (threadIdx.x < 32) {
    load_latent_by_boxes<Traits>(params, shared);
  }
}

}  // namespace flash3::cuda::sm90
