// SPDX-License-Identifier: Apache-2.0
// The producer of a paged FP8 kernel: what load_fp8.cuh does, by a whole warp. A key tile is
// several boxes of rows, each by one lane, which looks up where they lie, as in load_pages.cuh. The
// rows of Q may be of several heads (HeadPack), and have a scale each, of which all lanes start the
// copies. The first lane leads: it loads Q, starts the copies of a key tile's scales and arrives at
// the barriers.
#pragma once

#include "cuda/device/ptx/async_copies.cuh"
#include "cuda/sm90/forward/paged_boxes.cuh"
#include "cuda/sm90/forward/split.cuh"

namespace flash3::cuda::sm90 {

// Starts to copy the scales of a warpgroup's rows of Q, whose first query is `query`. Rows after
// the end of the sequence and idle ones take one that exists. Everything is computed anew for each
// row: the loader's registers are few.
__device__ __forceinline__ void copy_row_scales(float (&shared)[kWarpgroupRows],
                                                const ForwardParams& params, const WorkTile& work,
                                                int query) {
  const ListedSequence& s = work.sequence;
  const ScaleView& view = fp8_params(params).q_scale;
#pragma unroll 1
  for (int row = int(threadIdx.x) % 32; row < HeadPack::kRows; row += 32) {
    const int head = work.head_group * params.pack.heads + params.pack.head_of(row),
              token = min(query + params.pack.query_of(row), s.q_length - 1);
    RowScales scale{view.data};
    if (scale.first)
      scale.first +=
          s.batch * view.stride_batch +
          unsigned(head) / unsigned(view.heads_per_scale) * view.stride_head +
          scale_block(fp8_params(params).q_packed, s.q_first, s.batch, token) * view.stride_block;
    copy_scale(&shared[row], scale, 0);
  }
}

// load_fp8_q() of rows of several heads, by a whole warp.
template <class Traits>
__device__ __forceinline__ void load_packed_q(const ForwardParams& params,
                                              typename Traits::Shared& shared, const WorkTile& work,
                                              const typename Traits::QState& state, bool leads) {
  using Tile = typename Traits::QTile;
  const ListedSequence& s = work.sequence;
#pragma unroll 1
  for (int w = 0; w < Traits::kWarpgroups; ++w) {
    auto& barriers = shared.q_barriers[w];
    uint64_t* const full = &barriers.full[state.stage];
    const int query = work.query + w * params.pack.queries;
    wait(&barriers.empty[state.stage], state.phase ^ 1, "q_empty");
    if (leads)
      load_box<Tile>(shared.q[state.stage][w], &params.q,
                     box_at(params.q_rows, s.batch, s.q_first, s.q_length, query,
                            work.head_group * params.pack.heads),
                     full);
    copy_row_scales(shared.q_scales[state.stage][w], params, work, query);
    arrive_behind_copies(full);
    __syncwarp();  // the leader's arrival is for scales that lanes have stored themselves too
    if (leads) arrive_expect_bytes(full, params.pack.rows() * Tile::kCols);
  }
}

// Everything, by one warp, in the order of load_fp8(). Numbers of uses stand for the states of the
// rings, of which K and V have one: the loader's registers are few.
template <class Traits>
__device__ __forceinline__ void load_fp8_pages(const ForwardParams& params,
                                               typename Traits::Shared& shared) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::RawVTile;
  static_assert(Traits::kRawStages == Traits::kStages, "K and V come by turns");
  const PagedBoxes<Traits::kTileN, true> boxes(params);
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
        load_packed_q<Traits>(params, shared, work, Traits::QState::at(loads), leads);
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

template <class Traits>
struct Fp8Producer<Traits, true> : Fp8Barriers<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const Fp8ProducerWarp role{warp_in_warpgroup()};
    if (role == Fp8ProducerWarp::kSchedule) {
      schedule_cache<Traits, true>(params, shared);
    } else if (role >= Fp8ProducerWarp::kTranspose) {
      transpose_v<Traits>(shared, int(threadIdx.x) - 32 * int(Fp8ProducerWarp::kTranspose));
    } else {
      load_fp8_pages<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::cuda::sm90
