// The producer: three threads, each with one stream of TMA loads, each as far ahead of the
// consumers as its buffer allows.
#pragma once

#include "hopper/device/tma.cuh"
#include "hopper/forward/kernel.cuh"

namespace flash3::hopper {

// Loads one tile chunk by chunk; the bytes of all of them complete the barrier. rows: of the box,
// which may fill only a part of the tile.
template <class Tile, class Coordinates>
__device__ __forceinline__ void load_tile(uint8_t* shared, const TensorMap* map, Coordinates at,
                                          int rows, uint64_t* full) {
  arrive_expect_bytes(full, rows * (Tile::kCols * 2));
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
    at.dim = c * Tile::kChunk;
    tma_load(shared + c * Tile::kChunkBytes, map, at, full);
  }
}

// Q: each warpgroup's rows as soon as that warpgroup has stored its previous output, which lies in
// the same place.
template <class Traits>
__device__ __forceinline__ void load_q(const ForwardParams& params,
                                       typename Traits::Shared& shared) {
  TileReader<false> tiles{shared.tiles};
  prefetch(&params.q);
  typename Traits::QState state;
  WorkTile work;
  while (tiles.next(work)) {
    if (!work.has_keys()) continue;
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      auto& barriers = shared.q_barriers[w];
      wait(&barriers.empty[state.stage], state.phase ^ 1, BarrierName::kQEmpty);
      const QueryCoordinates at{0, work.query + w * params.pack.queries, work.head_group,
                                work.batch};
      load_tile<typename Traits::QTile>(shared.q[state.stage][w], &params.q, at, params.pack.rows(),
                                        &barriers.full[state.stage]);
    }
    state.advance();
  }
}

// K or V: the key tiles of each work tile from the last to the first. When few of them are left to
// load, `wanted`, if given, asks the scheduler for the next work tile.
template <class Traits, class Tile>
__device__ __forceinline__ void load_key_tiles(const ForwardParams& params, const TensorMap* map,
                                               uint8_t (&stages)[Traits::kStages][Tile::kBytes],
                                               RingBarriers<Traits::kStages>& barriers,
                                               BarrierName empty, TileRing& ring,
                                               uint64_t* wanted) {
  TileReader<false> tiles{ring};
  prefetch(map);
  typename Traits::KvState state;
  WorkTile work;
  while (tiles.next(work)) {
    const int head = work.head_group / params.groups_per_kv_head;
    constexpr int kKeyTilesLeft = 1;
    const int ask = min(work.key_tile_begin + kKeyTilesLeft, work.key_tile_end - 1);
    if (wanted != nullptr && !work.has_keys()) arrive(wanted);
    for (int n = work.key_tile_end - 1; n >= work.key_tile_begin; --n) {
      wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
      load_tile<Tile>(stages[state.stage], map,
                      KeyCoordinates{0, n * Traits::kTileN, head, work.batch}, Tile::kRows,
                      &barriers.full[state.stage]);
      state.advance();
      if (wanted != nullptr && n == ask) arrive(wanted);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void load_k(const ForwardParams& params,
                                       typename Traits::Shared& shared) {
  load_key_tiles<Traits, typename Traits::KTile>(params, &params.k, shared.k, shared.k_barriers,
                                                 BarrierName::kKEmpty, shared.tiles,
                                                 &shared.tiles.wanted);
}

template <class Traits>
__device__ __forceinline__ void load_v(const ForwardParams& params,
                                       typename Traits::Shared& shared) {
  load_key_tiles<Traits, typename Traits::VTile>(params, &params.v, shared.v, shared.v_barriers,
                                                 BarrierName::kVEmpty, shared.tiles, nullptr);
}

}  // namespace flash3::hopper
