// The producer: one thread issues all TMA loads, as far ahead of the consumers as the buffers
// allow. What an element stands for travels beside the tile: Q's scale with each warpgroup's rows,
// K's and V's with K's tile.
#pragma once

#include "hopper/device/tma.cuh"
#include "hopper/forward_fp8/kernel.cuh"

namespace flash3::hopper {

// The scale of a row of a sequence.
__device__ __forceinline__ float load_scale(const ScaleView& scale, bool packed, int batch,
                                            int first, int head, int row) {
  if (scale.data == nullptr) return 1.f;
  return __ldg(scale.data + scale.offset(batch, head, scale_block(packed, first, batch, row)));
}

// Q rows of every warpgroup; out_scale: see QueryScales.
template <class Traits>
__device__ __forceinline__ void load_fp8_q(const ForwardParams& params,
                                           typename Traits::Shared& shared, const WorkTile& work,
                                           const typename Traits::QState& state, float out_scale) {
  using Tile = typename Traits::QTile;
  const SequenceRows& s = work.sequence;
#pragma unroll 1
  for (int w = 0; w < Traits::kWarpgroups; ++w) {
    auto& barriers = shared.q_barriers[w];
    uint64_t* full = &barriers.full[state.stage];
    const int row = work.query + w * kWarpgroupRows;
    wait(&barriers.empty[state.stage], state.phase ^ 1, BarrierName::kQEmpty);
    shared.query_scales[state.stage].out[w] = out_scale;
    load_box<Tile>(shared.q[state.stage][w], &params.q,
                   box_at(params.q_rows, s.batch, s.q_first, s.q_length, row, work.head_group),
                   full);
    // Rows behind the end have no scale, and need none.
    const float scale = row < s.q_length ? load_scale(params.fp8.q_scale, params.fp8.q_packed,
                                                      s.batch, s.q_first, work.head_group, row)
                                         : 1.f;
    shared.query_scales[state.stage].q[w] = scale * params.fp8.q_factor;
    arrive_expect_bytes(full, Tile::kBytes);
  }
}

// Everything, by one thread. The key tiles of each work tile from the last to the first, K before
// V, and Q behind the first K: where Q has one slot, the next Q waits for the last products of the
// tile before. When few key tiles are left to load, the scheduler is asked for the next work tile.
template <class Traits>
__device__ __forceinline__ void load_fp8(const ForwardParams& params,
                                         typename Traits::Shared& shared) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::RawVTile;
  TileReader tiles{shared.tiles};
  prefetch(&params.q);
  prefetch(&params.k);
  prefetch(&params.v);
  typename Traits::QState q_state;
  typename Traits::KvState k_state;
  typename Traits::RawState v_state;
  float previous_v_scale = 1.f;
  for (; tiles.next(); tiles.release()) {
    const WorkTile& work = tiles.tile();
    if (!work.has_keys()) {
      arrive(&shared.tiles.wanted);
      continue;
    }
    const SequenceRows& s = work.sequence;
    constexpr int kKeyTilesLeft = 1;
    const int first = work.key_tile_end - 1, ask = min(work.key_tile_begin + kKeyTilesLeft, first),
              head = work.head_group / params.groups_per_kv_head;
    const auto scale = [&](const ScaleView& view, int n) {
      return load_scale(view, params.fp8.k_packed, s.batch, s.k_first, head, n * KTile::kRows);
    };
#pragma unroll 1
    for (int n = first; n >= work.key_tile_begin; --n) {
      // On their way while this thread waits for the stage.
      const float k_scale = scale(params.fp8.k_scale, n), v_scale = scale(params.fp8.v_scale, n);
      uint64_t* full = &shared.k_barriers.full[k_state.stage];
      wait(&shared.k_barriers.empty[k_state.stage], k_state.phase ^ 1, BarrierName::kKEmpty);
      load_box<KTile>(shared.k[k_state.stage], &params.k,
                      box_at(params.k_rows, s.batch, s.k_first, s.k_length, n * KTile::kRows, head),
                      full);
      if (n == first) previous_v_scale = v_scale;
      shared.key_scales[k_state.stage] = {
          k_scale, v_scale == previous_v_scale ? 1.f : previous_v_scale / v_scale};
      previous_v_scale = v_scale;
      arrive_expect_bytes(full, KTile::kBytes);
      k_state.advance();
      if (n == first) {
        load_fp8_q<Traits>(params, shared, work, q_state,
                           scale(params.fp8.v_scale, work.key_tile_begin));
        q_state.advance();
      }

      full = &shared.raw_v_barriers.full[v_state.stage];
      wait(&shared.raw_v_barriers.empty[v_state.stage], v_state.phase ^ 1, BarrierName::kRawVEmpty);
      arrive_expect_bytes(full, VTile::kBytes);
      load_box<VTile>(shared.raw_v[v_state.stage], &params.v,
                      box_at(params.v_rows, s.batch, s.k_first, s.k_length, n * VTile::kRows, head),
                      full);
      v_state.advance();
      if (n == ask) arrive(&shared.tiles.wanted);
    }
  }
}

}  // namespace flash3::hopper
