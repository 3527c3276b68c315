// Adding dQ to the sums in global memory: in any order, or, deterministic, in turn.
#pragma once

#include "hopper/backward/params.h"
#include "hopper/device/barriers.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/roles.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

// A warpgroup's part of the sums, and the turns to add to it, along the walk over the query tiles
// of each query head of the work.
template <class Traits>
struct DqWalk {
  static constexpr int kTileFloats = Traits::kTileM * Traits::kHeadDim;

  const BackwardParams& params;
  const KeyTile& work;
  int part;      // of a tile's turns
  int row;       // of the present head in [batch, head]
  int tile;      // of queries
  int turn = 0;  // of this block at the present tile

  __device__ __forceinline__ DqWalk(const BackwardParams& params, const KeyTile& work, int part)
      : params(params),
        work(work),
        part(part),
        row(work.batch * params.rows.heads_q + work.kv_head * params.heads_per_kv_head),
        tile(work.query_tile_begin) {}

  __device__ __forceinline__ float* sums() const {
    return params.rows.dq + int64_t(row) * params.rows.padded_q * Traits::kHeadDim +
           int64_t(tile) * kTileFloats;
  }
  __device__ __forceinline__ void advance() {
    tile = work.next(tile);
    if (tile == work.query_tile_begin) ++row;
  }

  __device__ __forceinline__ bool in_turn() const { return params.rows.turns != nullptr; }
  // By one thread, before it or its warpgroup adds.
  __device__ __forceinline__ void await_turn() {
    turn = turn_of(params, Traits::kTileM, Traits::kTileN, Traits::kBand, work.key / Traits::kTileN,
                   tile);
    wait_for_turn(counter(), turn, BarrierName::kDqTurn);
  }
  // By the same thread, when what was added is visible to it.
  __device__ __forceinline__ void end_turn() const { store_release(counter(), turn + 1); }

 private:
  __device__ __forceinline__ int* counter() const {
    const int64_t tiles = params.rows.padded_q / Traits::kTileM;
    return params.rows.turns + (row * tiles + tile) * kTurns + part;
  }
};

// The warp that adds a consumer warpgroup's dQ: it waits for the blocks in shared memory and lets
// the copy engine add them.
template <class Traits>
__device__ __forceinline__ void add_dq(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       int warpgroup) {
  constexpr int kOwnFloats = DqWalk<Traits>::kTileFloats / Traits::kWarpgroups;
  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  if (tiles == 0) return;
  DqWalk<Traits> walk(params, work, warpgroup);
  const bool leader = threadIdx.x % 32 == 0;
  // Consumers hand a tile over when they are busy with the next; the first time, nothing.
  for (int tile = -1; tile < tiles; ++tile) {
    sync(NamedBarrier::kOutputStaged, warpgroup, kWarpgroupThreads + 32);
    if (leader && tile >= 0) {
      if (walk.in_turn()) walk.await_turn();
      bulk_add(walk.sums() + warpgroup * kOwnFloats,
               shared.fragments[warpgroup * Traits::kOwnBlocks], kOwnFloats * 4);
      tma_store_commit();
      if (walk.in_turn()) {
        tma_store_wait();
        fence_proxy_async_global();
        walk.end_turn();
      } else {
        tma_store_wait_read();
      }
      walk.advance();
    }
    if (leader) arrive(&shared.dq_empty[warpgroup]);
  }
}

}  // namespace flash3::hopper
