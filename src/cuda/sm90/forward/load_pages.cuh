// SPDX-License-Identifier: Apache-2.0
// The producer of a paged kernel: the keys of a sequence lie in elements of K and V that a table
// names. A key tile is several boxes of rows, each by one lane of the loader's warp, which looks up
// where they lie. The maps of K and V are ragged (device/tile.cuh), so that rows after the
// sequence's last key read as zeros here too, whatever their pages hold.
#pragma once

#include "cuda/sm90/forward/key_pages.hpp"
#include "cuda/sm90/forward/load.cuh"
#include "cuda/sm90/forward/split.cuh"

namespace flash3::cuda::sm90 {

// load_key_tiles() for pages, by a whole warp. Numbers of uses stand for the states of the rings:
// the loader's registers are few.
template <class Traits, class Tile>
__device__ __forceinline__ void load_paged_tiles(const ForwardParams& params, const TensorMap* map,
                                                 const RowMap& rows,
                                                 uint8_t (&stages)[Traits::kStages][Tile::kBytes],
                                                 RingBarriers<Traits::kStages>& barriers,
                                                 const char* empty, TileRing& ring,
                                                 uint64_t* wanted, uint64_t* loaded) {
  const KeyPages& pages = kernel_params(params).pages;
  const int lane = threadIdx.x % 32, at_row = lane * pages.box_rows;
  const bool leads = lane == 0;
  if (leads) prefetch(map);
  int step = 0;  // stages filled
  uint32_t loaded_phase = 0;
  for (int tiles = 0;; ++tiles) {
    const auto slot = PipelineState<kTileSlots>::at(tiles);
    wait(&ring.barriers.full[slot.stage], slot.phase, "tile_full");
    const WorkTile& work = ring.tiles[slot.stage];
    if (!work.valid) break;
    const auto find_row = [&](int n) {
      if (n < work.key_tile_begin || at_row >= Tile::kRows) return 0;
      return row_of_key<Traits::kSplit>(pages, rows, work.sequence, n * Tile::kRows + at_row);
    };
    int n = work.key_tile_end - 1, next_row = find_row(n);
    if (wanted != nullptr && leads && !work.has_keys()) arrive(wanted);
    for (; n >= work.key_tile_begin; --n, ++step) {
      const int row = next_row;
      next_row = find_row(n - 1);  // long before it is needed
      const auto state = Traits::KvState::at(step);
      wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
      const bool may_hide =
          loaded != nullptr && params.schedule.may_hide_keys && n == work.key_tile_begin;
      const int hidden = may_hide ? work.hidden_keys(Tile::kRows) : 0;
      uint64_t* const full = &barriers.full[state.stage];
      if (leads) arrive_expect_bytes(hidden > 0 ? loaded : full, Tile::kBytes);
      __syncwarp();
      if (at_row < Tile::kRows) {
        const int left = rows_left(pages, work.sequence, n * Tile::kRows + at_row);
        const BoxAt at{0, work.head_group / params.groups_per_kv_head, kRaggedEnd - left,
                       row + left, true};
        load_box<Tile>(stages[state.stage] + at_row * Tile::kRowBytes, map, at,
                       hidden > 0 ? loaded : full);
      }
      if (hidden > 0) {
        if (leads) clear_when_loaded<Tile>(stages[state.stage], hidden, loaded, loaded_phase, full);
        loaded_phase ^= 1;
      }
      if (wanted != nullptr && leads && n == ask_at(work)) arrive(wanted);
    }
    __syncwarp();
    if (leads) arrive(&ring.barriers.empty[slot.stage]);
  }
}

template <class Traits>
struct TmaProducer<Traits, true, false> : TmaBarriers<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const ProducerWarp role{warp_in_warpgroup()};
    if (role == ProducerWarp::kSchedule) {
      schedule_cache<Traits>(params, shared);
    } else if (role == ProducerWarp::kLoadK) {
      load_paged_tiles<Traits, typename Traits::KTile>(params, &params.k, params.k_rows, shared.k,
                                                       shared.k_barriers, "k_empty", shared.tiles,
                                                       &shared.tiles.wanted, nullptr);
    } else if (role == ProducerWarp::kLoadV) {
      load_paged_tiles<Traits, typename Traits::VTile>(params, &params.v, params.v_rows, shared.v,
                                                       shared.v_barriers, "v_empty", shared.tiles,
                                                       nullptr, &shared.v_loaded);
    } else if (threadIdx.x % 32 == 0) {
      load_q<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::cuda::sm90
