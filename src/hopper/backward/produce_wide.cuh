// SPDX-License-Identifier: Apache-2.0
// The producer of wide tiles: one thread of it loads; all of it computes dQ = dS·K from the
// consumers' dS, and adds it to the sums in global memory from its registers.
#pragma once

#include "hopper/backward/add_dq.cuh"
#include "hopper/backward/load.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/device/constant.cuh"
#include "hopper/device/ptx/reduce.cuh"

namespace flash3::hopper {

template <class Traits>
__device__ __forceinline__ void produce_wide(const BackwardParams& params,
                                             typename Traits::Shared& shared,
                                             const KeyTile& shared_work) {
  using KTile = typename Traits::KTile;
  using DsTile = typename Traits::DsTile;
  constexpr int kBlocks = Traits::kHeadDim / 64;  // of dQ's columns
  // Of kOutputStaged, behind the consumers'.
  constexpr int kTurnCome = kConsumerWarpgroups, kAdded = kTurnCome + 1;
  static_assert(kAdded < kMaxConsumerWarpgroups);
  static_assert(kBlocks > 1);
  // In registers: the loading thread's warp computes too, and would wait for shared memory.
  const KeyTile work = shared_work;
  const int thread = thread_in_warpgroup();
  const bool leader = thread == 0;
  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  const auto load_tile = [&](int i) {
    if (i >= tiles) return;
    load_q<Traits>(params, shared, work, i);
    load_dout<Traits>(params, shared, work, i);
  };
  if (leader) {
    load_k<Traits>(params, shared, work);
    load_tile(0);
    load_v<Traits>(params, shared, work);
    load_tile(1);
  }
  __syncwarp();

  const Descriptor k_columns = descriptor(KTile::kMajorMN, shared.k);
  const Descriptor ds_rows = descriptor(DsTile::kMajorK, shared.ds);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const DsState ds = DsState::at(tile);
    const DqSums<Traits> sums(params, work, 0, tile);
    // Turns are awaited by another warp than the one that ends them: both take long.
    const bool in_turn = sums.in_turn(), awaits = in_turn && thread == 32;
    int turn = 0;
    bool has_come = true;
    if (awaits) {
      turn = sums.turn();
      has_come = sums.has_come(turn);
    }
    __syncwarp();
    wait(&shared.ds_barriers.full[ds.stage], ds.phase, "ds_full");
    float* to = sums.begin() + thread * 4;
    const auto add_block = [&](int block, auto first) {
      float r_dq[32];
      issue_dq_block<Traits::kElement, DsTile, KTile>(r_dq, ds_rows + ds.stage * DsTile::kBytes,
                                                      k_columns + block * KTile::kChunkBytes);
      if constexpr (first.value) {
        if (!has_come) sums.await(turn);
        __syncwarp();
      }
      wgmma_wait<0>();
      fence_operand(r_dq);
      if constexpr (first.value) {
        if (in_turn) sync(BackwardBarrier::kOutputStaged, kTurnCome, kWarpgroupThreads);
      }
      if (block == kBlocks - 1) arrive(&shared.ds_barriers.empty[ds.stage]);
#pragma unroll
      for (int j = 0; j < 8; ++j) add_to_global(to + j * 512, &r_dq[4 * j]);
      to += 64 * 64;
    };
    add_block(0, Constant<1>{});
    // Behind the first block the tile's stages are free, or soon will be.
    if (leader) load_tile(tile + 2);
    __syncwarp();
#pragma unroll 1
    for (int block = 1; block < kBlocks; ++block) add_block(block, Constant<0>{});
    if (!in_turn) continue;
    // The release is of all that the barrier has ordered before it: the others go on.
    if (thread / 32 == 0) {
      sync(BackwardBarrier::kOutputStaged, kAdded, kWarpgroupThreads);
      if (leader) sums.end_turn();
      __syncwarp();
    } else {
      arrive(BackwardBarrier::kOutputStaged, kAdded, kWarpgroupThreads);
    }
  }
}

}  // namespace flash3::hopper
