// SPDX-License-Identifier: Apache-2.0
// The producer of kernels that walk the lists of a mask (core/mask_lists.hpp): a work tile is a
// block of queries, and its key tiles are those of its list, from the last to the first.
#pragma once

#include "cuda/sm90/forward/list_place.cuh"
#include "cuda/sm90/forward/list_walk.cuh"
#include "cuda/sm90/forward/load.cuh"

namespace flash3::cuda::sm90 {

// K or V, as load_key_tiles(). note(stage, tile): before a tile of K is loaded.
template <class Traits, class Tile, class Note>
__device__ __forceinline__ void load_listed_tiles(const ForwardParams& params, const TensorMap* map,
                                                  const RowMap& rows,
                                                  uint8_t (&stages)[Traits::kStages][Tile::kBytes],
                                                  RingBarriers<Traits::kStages>& barriers,
                                                  const char* empty, TileRing& ring,
                                                  uint64_t* wanted, const Note& note) {
  TileReader tiles{ring};
  prefetch(map);
  typename Traits::KvState state;
  for (; tiles.next(); tiles.release()) {
    const WorkTile& work = tiles.tile();
    const int begin = work.key_tile_begin, ask = ask_at(work);
    bool asks = wanted != nullptr;
    if (!work.has_keys()) {
      if (asks) arrive(wanted);
      continue;
    }
    ListPlace<Traits> next{kernel_params(params).mask, work.key_tile_end};
    next.find_before(begin);
    while (next.n >= begin) {
      const ListPlace<Traits> at = next;
      next.find_before(begin);  // it comes while a stage is awaited
      const MaskTile tile = at.tile(next.n < begin);
      wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
      note(state.stage, tile);
      load_key_tile<Traits, Tile>(params, work, tiles.slots(), tile.tile(), map, rows,
                                  stages[state.stage], &barriers.full[state.stage]);
      state.advance();
      if (asks && next.n < ask) arrive(wanted), asks = false;
    }
  }
}

template <class Traits>
struct TmaProducer<Traits, false, true> : TmaBarriers<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const ProducerWarp role{warp_in_warpgroup()};
    if (role == ProducerWarp::kSchedule) {
      // In the order of a band: tiles differ in length.
      schedule_tiles<Traits::kTileN, true>(params.schedule, shared.tiles,
                                           KeysOfList<Traits>{kernel_params(params).mask});
    } else if (threadIdx.x % 32 == 0) {
      if (role == ProducerWarp::kLoadQ) load_q<Traits>(params, shared);
      if (role == ProducerWarp::kLoadK)
        load_listed_tiles<Traits, typename Traits::KTile>(
            params, &params.k, params.k_rows, shared.k, shared.k_barriers, "k_empty", shared.tiles,
            &shared.tiles.wanted,
            [&](int stage, const MaskTile& tile) { note_tile(shared.listed[stage], tile); });
      if (role == ProducerWarp::kLoadV)
        load_listed_tiles<Traits, typename Traits::VTile>(
            params, &params.v, params.v_rows, shared.v, shared.v_barriers, "v_empty", shared.tiles,
            nullptr, [](int, const MaskTile&) {});
    }
  }
};

}  // namespace flash3::cuda::sm90
