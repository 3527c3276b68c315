// Adds a consumer warpgroup's dQ to the sums in global memory: one warp, which waits for the blocks
// in shared memory and lets the copy engine add them there.
#pragma once

#include "hopper/backward/kernel.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

template <class Traits>
__device__ __forceinline__ void add_dq(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       int warpgroup) {
  constexpr int kTileFloats = Traits::kTileM * Traits::kHeadDim;
  constexpr int kOwnFloats = kTileFloats / Traits::kWarpgroups;
  const int m_tiles = work.query_tile_end - work.query_tile_begin;
  if (m_tiles <= 0) return;

  const int64_t head_floats = int64_t(params.rows.padded_q) * Traits::kHeadDim;
  float* sums =
      params.rows.dq +
      (int64_t(work.batch) * params.rows.heads_q + work.kv_head * params.heads_per_kv_head) *
          head_floats +
      int64_t(work.query_tile_begin) * kTileFloats + warpgroup * kOwnFloats;
  const auto add = [&](float* to) {
    sync(NamedBarrier::kOutputStaged, warpgroup, kWarpgroupThreads + 32);
    if (threadIdx.x % 32 == 0) {
      bulk_add(to, shared.fragments[warpgroup * Traits::kOwnBlocks], kOwnFloats * 4);
      tma_store_commit();
      tma_store_wait_read();
      arrive(&shared.dq_empty[warpgroup]);
    }
  };
  // Consumers hand a tile over when they are busy with the next: zeros first.
  add(sums);
  for (int h = 0; h < params.heads_per_kv_head; ++h) {
    for (int m = 0; m < m_tiles; ++m) add(sums + h * head_floats + int64_t(m) * kTileFloats);
  }
}

}  // namespace flash3::hopper
