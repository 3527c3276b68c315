// Loading, by two threads: one K, then tiles of Q with their LSE; the other V, then tiles of dOut
// with their delta.
#pragma once

#include "hopper/backward/kernel.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

template <class Tile>
__device__ __forceinline__ void load_columns(uint8_t* shared, const TensorMap* map,
                                             KeyCoordinates at, uint64_t* full) {
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
    at.dim = c * Tile::kChunk;
    tma_load(shared + c * Tile::kChunkBytes, map, at, full);
  }
}

// The i-th query tile of the walk over those of each query head of the work's KV head.
struct QueryPlace {
  int head;  // of all query heads
  int tile;

  __device__ __forceinline__ QueryPlace(const BackwardParams& params, const KeyTile& work, int i) {
    const int tiles = work.query_tiles(), own_head = i / tiles;
    head = work.kv_head * params.heads_per_kv_head + own_head;
    tile = work.query_tile_begin + (i - own_head * tiles);
  }
};

// The i-th query tile of a ring, with one float a row beside it.
template <int kStages, class Tile>
__device__ __forceinline__ void load_queries(const BackwardParams& params, const KeyTile& work,
                                             int i, const TensorMap* map, const float* rows,
                                             uint8_t (&tiles)[kStages][Tile::kBytes],
                                             float (&row_slots)[kStages][Tile::kRows],
                                             RingBarriers<kStages>& barriers, BarrierName empty) {
  const QueryPlace at(params, work, i);
  const int64_t first_row =
      (int64_t(work.batch) * params.rows.heads_q + at.head) * params.rows.padded_q +
      at.tile * Tile::kRows;
  const int stage = i % kStages;
  wait(&barriers.empty[stage], i / kStages % 2 ^ 1, empty);
  uint64_t* full = &barriers.full[stage];
  arrive_expect_bytes(full, Tile::kBytes + Tile::kRows * 4);
  load_columns<Tile>(tiles[stage], map, {0, at.tile * Tile::kRows, at.head, work.batch}, full);
  bulk_load(row_slots[stage], rows + first_row, Tile::kRows * 4, full);
}

template <class Traits>
__device__ __forceinline__ void load_k(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work) {
  using Tile = typename Traits::KTile;
  arrive_expect_bytes(&shared.k_full, Tile::kBytes);
  load_columns<Tile>(shared.k, &params.k, {0, work.key, work.kv_head, work.batch}, &shared.k_full);
}

template <class Traits>
__device__ __forceinline__ void load_v(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work) {
  using Tile = typename Traits::VTile;
  arrive_expect_bytes(&shared.v_full, Tile::kBytes);
  load_columns<Tile>(shared.v, &params.v, {0, work.key, work.kv_head, work.batch}, &shared.v_full);
}

template <class Traits>
__device__ __forceinline__ void load_q(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       int i) {
  load_queries<Traits::kQStages, typename Traits::QTile>(params, work, i, &params.q,
                                                         params.rows.lse_log2, shared.q, shared.lse,
                                                         shared.q_barriers, BarrierName::kQEmpty);
}

template <class Traits>
__device__ __forceinline__ void load_dout(const BackwardParams& params,
                                          typename Traits::Shared& shared, const KeyTile& work,
                                          int i) {
  load_queries<Traits::kDoutStages, typename Traits::DoutTile>(
      params, work, i, &params.dout, params.rows.delta, shared.dout, shared.delta,
      shared.dout_barriers, BarrierName::kDoutEmpty);
}

template <class Traits>
__device__ __forceinline__ void load_q_side(const BackwardParams& params,
                                            typename Traits::Shared& shared, const KeyTile& work) {
  load_k<Traits>(params, shared, work);
  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  for (int i = 0; i < tiles; ++i) load_q<Traits>(params, shared, work, i);
}

template <class Traits>
__device__ __forceinline__ void load_dout_side(const BackwardParams& params,
                                               typename Traits::Shared& shared,
                                               const KeyTile& work) {
  load_v<Traits>(params, shared, work);
  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  for (int i = 0; i < tiles; ++i) load_dout<Traits>(params, shared, work, i);
}

}  // namespace flash3::hopper
