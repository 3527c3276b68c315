// SPDX-License-Identifier: Apache-2.0
// The producer of a kernel whose K and V are widened: one warp loads Q, K, V and their scales, two
// widen. A half of a key tile is several boxes of rows, each by one lane, which looks up where they
// lie, as in load_pages.cuh; without a table a sequence has its own element. The first lane leads.
#pragma once

#include "cuda/device/ptx/async_copies.cuh"
#include "cuda/sm90/forward/load.cuh"
#include "cuda/sm90/forward/paged_boxes.cuh"
#include "cuda/sm90/forward/split.cuh"
#include "cuda/sm90/forward/widen_keys.cuh"

namespace flash3::cuda::sm90 {

// One warp loads everything, and two widen.
enum class WideningWarp : int { kLoad = 0, kSchedule = 1, kWiden = 2 };

// Everything, by one warp. The key tiles of each work tile from the last to the first, K before V,
// and Q after the first K.
template <class Traits>
__device__ __forceinline__ void load_widened(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
  const PagedBoxes<Traits::kTileN, true> boxes(params);
  const bool leads = boxes.leads();
  if (leads) {
    prefetch(&params.q);
    prefetch(&params.k);
    prefetch(&params.v);
  }
  typename Traits::RawState state;
  int loads = 0;  // of Q
  uint32_t loaded_phase = 0;
  for (int tiles = 0;; ++tiles) {
    const auto slot = PipelineState<kTileSlots>::at(tiles);
    wait(&shared.tiles.barriers.full[slot.stage], slot.phase, "tile_full");
    const WorkTile& work = shared.tiles.tiles[slot.stage];
    if (!work.valid) break;
    if (leads && !work.has_keys()) arrive(&shared.tiles.wanted);
    int n = work.key_tile_end - 1;
    PagePlace place = boxes.find(work, n);
    // The part of the key tile from first_row on; hidden: keys of it before the first that is
    // seen.
    const auto load = [&]<class Tile>(const TensorMap* map, const RowMap& rows, int first_row,
                                      int hidden, bool with_scales) {
      uint64_t* const full = &shared.raw_barriers.full[state.stage];
      wait(&shared.raw_barriers.empty[state.stage], state.phase ^ 1, "raw_empty");
      uint64_t* const loaded = hidden > 0 ? &shared.v_loaded : full;
      if (leads) {
        if (with_scales) copy_paged_scales(shared.raw_scales[state.stage], params, work, place);
        arrive_behind_copies(full);
        arrive_expect_bytes(loaded, Tile::kBytes);
      }
      __syncwarp();
      boxes.template load<Tile>(shared.raw[state.stage], map, rows, work, n, first_row, place,
                                loaded);
      if (hidden > 0) {
        if (leads)
          clear_when_loaded<Tile>(shared.raw[state.stage], hidden, loaded, loaded_phase, full);
        loaded_phase ^= 1;
      }
      state.advance();
    };
#pragma unroll 1
    for (; n >= work.key_tile_begin; --n) {
#pragma unroll 1
      for (int row = 0; row < Traits::kTileN; row += Traits::kRawRows)
        load.template operator()<typename Traits::RawKTile>(&params.k, params.k_rows, row, 0,
                                                            row == 0);
      if (n == work.key_tile_end - 1) {
        const auto q_state = Traits::QState::at(loads++);
        for (int w = 0; leads && w < Traits::kWarpgroups; ++w) {
          auto& barriers = shared.q_barriers[w];
          wait(&barriers.empty[q_state.stage], q_state.phase ^ 1, "q_empty");
          load_query_rows<Traits>(params, work, nullptr, shared.q[q_state.stage][w], w,
                                  &barriers.full[q_state.stage]);
        }
      }
      const bool may_hide = params.schedule.may_hide_keys && n == work.key_tile_begin;
      const int hidden = may_hide ? work.hidden_keys(Traits::kTileN) : 0;
#pragma unroll 1
      for (int row = 0; row < Traits::kTileN; row += Traits::kRawRows)
        load.template operator()<typename Traits::RawVTile>(&params.v, params.v_rows, row,
                                                            hidden - row, false);
      if (leads && n == ask_at(work)) arrive(&shared.tiles.wanted);
      place = boxes.find(work, n - 1);  // while the next stage is waited for
    }
    __syncwarp();
    if (leads) arrive(&shared.tiles.barriers.empty[slot.stage]);
  }
}

template <class Traits>
struct WidenedProducer {
  static constexpr int kTileReaders = 1 + kWideningThreads;  // the loader, wideners

  static __device__ __forceinline__ void init_barriers(typename Traits::Shared& shared) {
    for (auto& barriers : shared.q_barriers) barriers.init(4);  // each warp
    shared.k_barriers.init(4 * Traits::kWarpgroups, kWideningThreads);
    shared.v_barriers.init(4 * Traits::kWarpgroups, kWideningThreads);
    shared.raw_barriers.init(kWideningThreads, 2);  // copies of scales arrive for themselves
  }

  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const WideningWarp role{warp_in_warpgroup()};
    if (role == WideningWarp::kSchedule) {
      schedule_cache<Traits, true>(params, shared);
    } else if (role >= WideningWarp::kWiden) {
      widen_keys<Traits>(shared, int(threadIdx.x) - 32 * int(WideningWarp::kWiden));
    } else {
      load_widened<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::cuda::sm90
