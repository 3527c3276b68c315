// The producer: two threads. One loads K, then streams Q with its LSE; the other V, then dOut with
// delta.
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

// The query tiles of each query head of the work's KV head, with one float a row beside each.
template <int kStages, class Tile>
__device__ __forceinline__ void stream_queries(const BackwardParams& params, const KeyTile& work,
                                               const TensorMap* map, const float* rows,
                                               uint8_t (&tiles)[kStages][Tile::kBytes],
                                               float (&row_slots)[kStages][Tile::kRows],
                                               RingBarriers<kStages>& barriers, BarrierName empty) {
  PipelineState<kStages> state;
  const int heads = params.heads_per_kv_head;
  for (int h = work.kv_head * heads; h < (work.kv_head + 1) * heads; ++h) {
    const int64_t first_row =
        (int64_t(work.batch) * params.rows.heads_q + h) * params.rows.padded_q;
    int m = work.query_tile_begin;
    for (int i = work.query_tiles(); i > 0; --i, m = work.next(m)) {
      wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
      uint64_t* full = &barriers.full[state.stage];
      arrive_expect_bytes(full, Tile::kBytes + Tile::kRows * 4);
      load_columns<Tile>(tiles[state.stage], map, {0, m * Tile::kRows, h, work.batch}, full);
      bulk_load(row_slots[state.stage], rows + first_row + m * Tile::kRows, Tile::kRows * 4, full);
      state.advance();
    }
  }
}

template <class Traits>
__device__ __forceinline__ void load_q_side(const BackwardParams& params,
                                            typename Traits::Shared& shared, const KeyTile& work) {
  using Tile = typename Traits::KTile;
  arrive_expect_bytes(&shared.k_full, Tile::kBytes);
  load_columns<Tile>(shared.k, &params.k, {0, work.key, work.kv_head, work.batch}, &shared.k_full);
  stream_queries<Traits::kQStages, typename Traits::QTile>(
      params, work, &params.q, params.rows.lse_log2, shared.q, shared.lse, shared.q_barriers,
      BarrierName::kQEmpty);
}

template <class Traits>
__device__ __forceinline__ void load_dout_side(const BackwardParams& params,
                                               typename Traits::Shared& shared,
                                               const KeyTile& work) {
  using Tile = typename Traits::VTile;
  arrive_expect_bytes(&shared.v_full, Tile::kBytes);
  load_columns<Tile>(shared.v, &params.v, {0, work.key, work.kv_head, work.batch}, &shared.v_full);
  stream_queries<Traits::kDoutStages, typename Traits::DoutTile>(
      params, work, &params.dout, params.rows.delta, shared.dout, shared.delta,
      shared.dout_barriers, BarrierName::kDoutEmpty);
}

}  // namespace flash3::hopper
