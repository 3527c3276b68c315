// SPDX-License-Identifier: Apache-2.0
// The roles of the library's 16-bit producer (cuda/sm90/forward/load.cuh), with stamps in their
// loops.
#pragma once

#include "cuda/sm90/forward/load.cuh"
#include "cuda/sm90/forward/load_fp8.cuh"
#include "device/trace/recorder.cuh"

namespace flash3::device {

using namespace cuda;
using namespace cuda::sm90;

// As load_q().
template <class Traits>
__device__ __forceinline__ void load_q_traced(const ForwardParams& params,
                                              typename Traits::Shared& shared) {
  Recorder trace(int(Role::kLoadQ), true);
  trace.begin(Phase::kWaitTile);
  TileReader tiles{shared.tiles};
  prefetch(&params.q);
  typename Traits::QState state;
  for (; tiles.next(); tiles.release(), trace.begin(Phase::kWaitTile)) {
    const WorkTile& work = tiles.tile();
    if (!work.has_keys()) continue;
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      auto& barriers = shared.q_barriers[w];
      trace.begin(Phase::kWaitRoom, w);
      wait(&barriers.empty[state.stage], state.phase ^ 1, "q_empty");
      trace.begin(Phase::kLoad, w);
      load_query_rows<Traits>(params, work, tiles.slots(), shared.q[state.stage][w], w,
                              &barriers.full[state.stage]);
    }
    state.advance();
  }
  trace.end();
}

// As load_key_tiles(), where no key is hidden.
template <class Traits, class Tile>
__device__ __forceinline__ void load_key_tiles_traced(
    Role role, const ForwardParams& params, const TensorMap* map, const RowMap& rows,
    uint8_t (&stages)[Traits::kStages][Tile::kBytes], RingBarriers<Traits::kStages>& barriers,
    const char* empty, TileRing& ring, uint64_t* wanted) {
  Recorder trace(int(role), true);
  trace.begin(Phase::kWaitTile);
  TileReader tiles{ring};
  prefetch(map);
  typename Traits::KvState state;
  for (; tiles.next(); tiles.release(), trace.begin(Phase::kWaitTile)) {
    const WorkTile& work = tiles.tile();
    const int begin = work.key_tile_begin, end = work.key_tile_end, ask = ask_at(work);
    if (wanted != nullptr && !work.has_keys()) arrive(wanted);
    for (int n = end - 1; n >= begin; --n) {
      trace.begin(Phase::kWaitRoom, n);
      wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
      trace.begin(Phase::kLoad, n);
      load_key_tile<Traits, Tile>(params, work, tiles.slots(), n, map, rows, stages[state.stage],
                                  &barriers.full[state.stage]);
      state.advance();
      if (wanted != nullptr && n == ask) arrive(wanted);
    }
  }
  trace.end();
}

template <class Traits>
struct TracedProducer : TmaProducer<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const ProducerWarp role{warp_in_warpgroup()};
    if (role == ProducerWarp::kSchedule) {
      schedule_traced<Traits>(params.schedule, shared.tiles);
    } else if (elect_one()) {
      if (role == ProducerWarp::kLoadQ) load_q_traced<Traits>(params, shared);
      if (role == ProducerWarp::kLoadK)
        load_key_tiles_traced<Traits, typename Traits::KTile>(
            Role::kLoadK, params, &params.k, params.k_rows, shared.k, shared.k_barriers, "k_empty",
            shared.tiles, &shared.tiles.wanted);
      if (role == ProducerWarp::kLoadV)
        load_key_tiles_traced<Traits, typename Traits::VTile>(
            Role::kLoadV, params, &params.v, params.v_rows, shared.v, shared.v_barriers, "v_empty",
            shared.tiles, nullptr);
    }
  }
};

// The library's FP8 producer (cuda/sm90/forward/load_fp8.cuh) with stamps in the scheduler and in
// the transposers. The loader has none: it is the library's.

using namespace cuda;
using namespace cuda::sm90;

// As transpose_v().
template <class Traits>
__device__ __forceinline__ void transpose_traced(typename Traits::Shared& shared, int thread) {
  Recorder trace(int(Role::kTransposeV), thread == 0);
  using RawVTile = typename Traits::RawVTile;
  using VTile = typename Traits::VTile;
  const uint32_t raw = uint32_t(__cvta_generic_to_shared(shared.raw_v)),
                 transposed = uint32_t(__cvta_generic_to_shared(shared.v));
  trace.begin(Phase::kWaitTile);
  TileReader tiles{shared.tiles};
  constexpr bool kInParts = Traits::kRawParts > 1;
  typename Traits::KvState to;
  while (uniform(tiles.next())) {
    const int begin = uniform(tiles.tile().key_tile_begin);
    int n = uniform(tiles.tile().key_tile_end) - 1;
    tiles.release();
#pragma unroll 1
    for (; n >= begin; --n) {
#pragma unroll
      for (int part = 0; part < Traits::kRawParts; ++part) {
        const typename Traits::RawState from{kInParts ? part : to.stage,
                                             kInParts ? uint32_t(to.stage) : to.phase};
        trace.begin(Phase::kWaitV, n);
        wait(&shared.raw_v_barriers.full[from.stage], from.phase, "raw_v_full");
        trace.begin(Phase::kWaitRoom, n);
        if (part == 0) wait(&shared.v_barriers.empty[to.stage], to.phase ^ 1, "v_empty");
        trace.begin(Phase::kTranspose, n);
        transpose_part<Traits>(raw + from.stage * RawVTile::kBytes,
                               transposed + to.stage * VTile::kBytes, part * RawVTile::kRows,
                               thread);
        arrive(&shared.raw_v_barriers.empty[from.stage]);
      }
      fence_shared_for_async_proxy();
      arrive(&shared.v_barriers.full[to.stage]);
      to.advance();
    }
    trace.begin(Phase::kWaitTile);
  }
  trace.end();
}

template <class Traits>
struct TracedFp8Producer : Fp8Producer<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const Fp8ProducerWarp role{warp_in_warpgroup()};
    if (role == Fp8ProducerWarp::kSchedule) {
      schedule_traced<Traits>(params.schedule, shared.tiles);
    } else if (role >= Fp8ProducerWarp::kTranspose) {
      transpose_traced<Traits>(shared, int(threadIdx.x) - 32 * int(Fp8ProducerWarp::kTranspose));
    } else if (elect_one()) {
      load_fp8<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::device
