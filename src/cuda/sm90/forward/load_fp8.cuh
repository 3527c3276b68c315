// SPDX-License-Identifier: Apache-2.0
// The producer: one thread issues all TMA loads, as far ahead of the consumers as the buffers
// allow. What an element stands for travels beside the tile: Q's scale with each warpgroup's rows,
// K's and V's with K's tile.
#pragma once

#include "cuda/device/ptx/async_copy.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/transpose_v.cuh"

namespace flash3::cuda::sm90 {

// One thread loads everything, and two warps transpose V.
enum class Fp8ProducerWarp : int { kLoad = 0, kSchedule = 1, kTranspose = 2 };

// Starts to copy the scale of a block into shared memory.
__device__ __forceinline__ void copy_scale(float* shared, const RowScales& scales, int block) {
  if (scales.first) {
    copy_async(shared, scales.first + block * scales.stride);
  } else {
    *shared = 1.f;
  }
}

// Q rows of every warpgroup.
template <class Traits>
__device__ __forceinline__ void load_fp8_q(const ForwardParams& params,
                                           typename Traits::Shared& shared, const WorkTile& work,
                                           const typename Traits::QState& state) {
  using Tile = typename Traits::QTile;
  const ListedSequence& s = work.sequence;
  const RowScales scales =
      row_scales(params.fp8.q_scale, params.fp8.q_packed, s.q_first, s.batch, work.head_group);
#pragma unroll 1
  for (int w = 0; w < Traits::kWarpgroups; ++w) {
    auto& barriers = shared.q_barriers[w];
    uint64_t* full = &barriers.full[state.stage];
    const int row = work.query + w * kWarpgroupRows;
    wait(&barriers.empty[state.stage], state.phase ^ 1, "q_empty");
    load_box<Tile>(shared.q[state.stage][w], &params.q,
                   box_at(params.q_rows, s.batch, s.q_first, s.q_length, row, work.head_group),
                   full);
    // Rows behind the end have no scale; any does for them.
    copy_scale(shared.q_scales[state.stage][w].q, scales,
               min(row, s.q_length - 1) / int(kScaleBlock));
    arrive_behind_copies(full);
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
  uint32_t loaded_phase = 0;
  for (; tiles.next(); tiles.release()) {
    const WorkTile& work = tiles.tile();
    if (!work.has_keys()) {
      arrive(&shared.tiles.wanted);
      continue;
    }
    const ListedSequence& s = work.sequence;
    const int first = work.key_tile_end - 1, ask = ask_at(work),
              head = work.head_group / params.groups_per_kv_head,
              last_block = (s.k_length - 1) / int(kScaleBlock);
    const auto scales_of = [&](const ScaleView& view) {
      return row_scales(view, params.fp8.k_packed, s.k_first, s.batch, head);
    };
    const RowScales k_scales = scales_of(params.fp8.k_scale),
                    v_scales = scales_of(params.fp8.v_scale);
    const bool hides =
        Traits::kBand && params.schedule.may_hide_keys && work.hidden_keys(Traits::kTileN) > 0;
    const int with_hidden_keys = hides ? work.key_tile_begin : -1;
#pragma unroll 1
    for (int n = first; n >= work.key_tile_begin; --n) {
      uint64_t* full = &shared.k_barriers.full[k_state.stage];
      wait(&shared.k_barriers.empty[k_state.stage], k_state.phase ^ 1, "k_empty");
      load_box<KTile>(shared.k[k_state.stage], &params.k,
                      box_at(params.k_rows, s.batch, s.k_first, s.k_length, n * KTile::kRows, head),
                      full);
      KeyTileScales& scales = shared.key_scales[k_state.phase][k_state.stage];
      const int block = min(n * KTile::kRows / int(kScaleBlock), last_block);
      copy_scale(&scales.k, k_scales, block);
      copy_scale(&scales.v, v_scales, block);
      arrive_behind_copies(full);
      arrive_expect_bytes(full, KTile::kBytes);
      k_state.advance();
      if (n == first) {
        load_fp8_q<Traits>(params, shared, work, q_state);
        q_state.advance();
      }

#pragma unroll 1
      for (int first_key = 0; first_key < Traits::kTileN; first_key += VTile::kRows) {
        full = &shared.raw_v_barriers.full[v_state.stage];
        wait(&shared.raw_v_barriers.empty[v_state.stage], v_state.phase ^ 1, "raw_v_empty");
        uint8_t* const raw_v = shared.raw_v[v_state.stage];
        const auto load_v = [&](uint64_t* barrier) {
          arrive_expect_bytes(barrier, VTile::kBytes);
          load_box<VTile>(raw_v, &params.v,
                          box_at(params.v_rows, s.batch, s.k_first, s.k_length,
                                 n * Traits::kTileN + first_key, head),
                          barrier);
        };
        const int hidden = Traits::kBand && n == with_hidden_keys
                               ? work.hidden_keys(Traits::kTileN) - first_key
                               : 0;
        if (hidden <= 0) {
          load_v(full);
        } else {
          load_v(&shared.v_loaded);
          clear_when_loaded<VTile>(raw_v, min(hidden, VTile::kRows), &shared.v_loaded, loaded_phase,
                                   full);
          loaded_phase ^= 1;
        }
        v_state.advance();
      }
      if (n == ask) arrive(&shared.tiles.wanted);
    }
  }
}

// Whatever loads.
template <class Traits>
struct Fp8Barriers {
  static constexpr int kTileReaders = 1 + kTransposeThreads;  // the loader, transposers

  static __device__ __forceinline__ void init_barriers(typename Traits::Shared& shared) {
    // The copies of scales make an arrival of their own; those of rows one of each lane's.
    for (auto& barriers : shared.q_barriers) barriers.init(4, Traits::kRowScales ? 1 + 32 : 2);
    shared.k_barriers.init(4 * Traits::kWarpgroups, 2);
    shared.v_barriers.init(4 * Traits::kWarpgroups, kTransposeThreads);
    shared.raw_v_barriers.init(kTransposeThreads);
  }
};

// The producer of FP8 kernels. load_fp8_pages.cuh has that of paged ones.
template <class Traits, bool kPaged = Traits::kConfig.paged>
struct Fp8Producer;

template <class Traits>
struct Fp8Producer<Traits, false> : Fp8Barriers<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const Fp8ProducerWarp role{warp_in_warpgroup()};
    if (role == Fp8ProducerWarp::kSchedule) {
      schedule_tiles<Traits::kTileN, Traits::kBand, false, true>(params.schedule, shared.tiles);
    } else if (role >= Fp8ProducerWarp::kTranspose) {
      transpose_v<Traits>(shared, int(threadIdx.x) - 32 * int(Fp8ProducerWarp::kTranspose));
    } else if (elect_one()) {
      load_fp8<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::cuda::sm90
