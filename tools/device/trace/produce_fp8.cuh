// SPDX-License-Identifier: Apache-2.0
// The library's FP8 producer (cuda/sm90/forward/load_fp8.cuh) with stamps in the scheduler and in
// the transposers. The loader has none: it is the library's.
#pragma once

#include "cuda/sm90/forward/load_fp8.cuh"
#include "device/trace/schedule.cuh"

namespace flash3::device {

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
