// SPDX-License-Identifier: Apache-2.0
// The producer of a paged FP8 kernel: what load_fp8.cuh does, by a whole warp. A key tile is
// several boxes of rows, each by one lane, which looks up where they lie, as in load_pages.cuh. The
// first lane leads: it loads Q, starts the copies of scales and arrives at the barriers.
#pragma once

#include "hopper/forward/paged_boxes.cuh"

namespace flash3::hopper {

// Everything, by one warp, in the order of load_fp8(). Numbers of uses stand for the states of the
// rings, of which K and V have one: the loader's registers are few.
template <class Traits>
__device__ __forceinline__ void load_fp8_pages(const ForwardParams& params,
                                               typename Traits::Shared& shared) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::RawVTile;
  static_assert(!Traits::Scales::kMayDiffer, "a key tile has one scale");
  static_assert(Traits::kRawStages == Traits::kStages, "K and V come by turns");
  const PagedBoxes<Traits::kTileN> boxes(params);
  const bool leads = boxes.leads();
  if (leads) {
    prefetch(&params.q);
    prefetch(&params.k);
    prefetch(&params.v);
  }
  int step = 0;   // stages of K and V filled
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
#pragma unroll 1
    for (; n >= work.key_tile_begin; --n, ++step) {
      const auto state = Traits::KvState::at(step);
      uint64_t* const k_full = &shared.k_barriers.full[state.stage];
      wait(&shared.k_barriers.empty[state.stage], state.phase ^ 1, "k_empty");
      if (leads) {
        copy_paged_scales(shared.key_scales[state.phase][state.stage], params, work, place);
        arrive_behind_copies(k_full);
        arrive_expect_bytes(k_full, KTile::kBytes);
      }
      __syncwarp();
      boxes.template load<KTile>(shared.k[state.stage], &params.k, params.k_rows, work, n, 0, place,
                                 k_full);
      if (n == work.key_tile_end - 1) {
        if (leads) load_fp8_q<Traits>(params, shared, work, Traits::QState::at(loads));
        ++loads;
      }

      uint64_t* const v_full = &shared.raw_v_barriers.full[state.stage];
      wait(&shared.raw_v_barriers.empty[state.stage], state.phase ^ 1, "raw_v_empty");
      const bool may_hide = params.schedule.may_hide_keys && n == work.key_tile_begin;
      const int hidden = may_hide ? work.hidden_keys(Traits::kTileN) : 0;
      uint64_t* const loaded = hidden > 0 ? &shared.v_loaded : v_full;
      if (leads) arrive_expect_bytes(loaded, VTile::kBytes);
      __syncwarp();
      boxes.template load<VTile>(shared.raw_v[state.stage], &params.v, params.v_rows, work, n, 0,
                                 place, loaded);
      if (hidden > 0) {
        if (leads)
          clear_when_loaded<VTile>(shared.raw_v[state.stage], hidden, loaded, loaded_phase, v_full);
        loaded_phase ^= 1;
      }
      if (leads && n == ask_at(work)) arrive(&shared.tiles.wanted);
      place = boxes.find(work, n - 1);  // while the next stage is waited for
    }
    __syncwarp();
    if (leads) arrive(&shared.tiles.barriers.empty[slot.stage]);
  }
}

// Producer of paged FP8 kernels.
template <class Traits>
  requires(Traits::kConfig.paged)
struct Fp8Producer<Traits> : Fp8Barriers<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const Fp8ProducerWarp role{warp_in_warpgroup()};
    if (role == Fp8ProducerWarp::kSchedule) {
      // A cache is a ragged batch whose sequences share no tiles.
      schedule_tiles<Traits::kTileN, Traits::kBand, true, true>(params.schedule, shared.tiles);
    } else if (role >= Fp8ProducerWarp::kTranspose) {
      transpose_v<Traits>(shared, int(threadIdx.x) - 32 * int(Fp8ProducerWarp::kTranspose));
    } else {
      load_fp8_pages<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::hopper
