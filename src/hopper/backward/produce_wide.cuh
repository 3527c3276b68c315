// SPDX-License-Identifier: Apache-2.0
// The producer of wide tiles. One of its threads loads. The whole warpgroup computes dQ = dS·K from
// the consumers' dS and adds it to the sums in global memory from its registers.
#pragma once

#include "hopper/backward/dq_sums.cuh"
#include "hopper/backward/load.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/device/ptx/memory.cuh"

namespace flash3::hopper {

// Orders the warpgroup's additions to a query tile if they are deterministic. A second warp waits
// for the semaphore and the first one releases it, because both take long.
template <class Traits>
struct WideDqOrder {
  const DqSums<Traits>& sums;
  const bool deterministic, waits;
  int order = 0;
  bool ready = true;

  __device__ __forceinline__ WideDqOrder(const DqSums<Traits>& own, int thread)
      : sums(own),
        deterministic(own.params.schedule.deterministic),
        waits(deterministic && thread == 32) {
    if (waits) {
      order = sums.order();
      ready = sums.semaphore().is_ready(order);
    }
    __syncwarp();
  }

  // Behind the issue of the first block: the thread that waits has found the semaphore ready.
  __device__ __forceinline__ void wait() const {
    if (!ready) sums.semaphore().wait(order);
    __syncwarp();
  }
  // All threads: the blocks before have added.
  __device__ __forceinline__ void meet() const {
    if (deterministic) sync(BackwardBarrier::kDqReady, 0, kWarpgroupThreads);
  }
  // Behind all additions. The barrier orders them before the release.
  __device__ __forceinline__ void release(int thread) const {
    if (!deterministic) return;
    if (thread / 32 == 0) {
      sync(BackwardBarrier::kDqAdded, 0, kWarpgroupThreads);
      if (thread == 0) sums.semaphore().release();
      __syncwarp();
    } else {
      arrive(BackwardBarrier::kDqAdded, 0, kWarpgroupThreads);
    }
  }
};

template <class Traits>
struct WideProducer {
  using KTile = typename Traits::KTile;
  using DsTile = typename Traits::DsTile;
  static constexpr int kBlocks = Traits::kHeadDim / 64;  // of dQ's columns
  static_assert(kBlocks > 1);

  const BackwardParams& params;
  typename Traits::Shared& shared;
  const KeyTile work;  // in registers: the loading thread's warp computes too, and would wait
  const int thread, tiles;
  const Descriptor k_columns, ds_rows;

  __device__ __forceinline__ bool is_loader() const { return warp_in_warpgroup() == 0; }

  __device__ __forceinline__ void load_tile(int i) const {
    if (i >= tiles) return;
    load_q<Traits>(params, shared, work, i);
    load_dout<Traits>(params, shared, work, i);
  }

  __device__ __forceinline__ void load_first() const {
    if (is_loader() && elect_one()) {
      load_k<Traits>(params, shared, work);
      load_tile(0);
      load_v<Traits>(params, shared, work);
      load_tile(1);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void issue_block(int block, int ds_stage, float (&r_dq)[32]) const {
    issue_dq_block<Traits::kElement, DsTile, KTile>(r_dq, ds_rows + ds_stage * DsTile::kBytes,
                                                    k_columns + block * KTile::kChunkBytes);
  }

  // Adds a block, and frees dS behind the last one.
  __device__ __forceinline__ void add_block(int block, int ds_stage, float* to,
                                            const float (&r_dq)[32]) const {
    if (block == kBlocks - 1) arrive(&shared.ds_barriers.empty[ds_stage]);
#pragma unroll
    for (int j = 0; j < 8; ++j) add_to_global(to + j * 512, &r_dq[4 * j]);
  }

  __device__ __forceinline__ void add_dq(int tile) const {
    const DsState ds = DsState::at(tile);
    const DqSums<Traits> sums(params, work, 0, tile);
    const WideDqOrder<Traits> order(sums, thread);
    wait(&shared.ds_barriers.full[ds.stage], ds.phase, "ds_full");
    float* to = sums.begin() + thread * 4;
    {
      float r_dq[32];
      issue_block(0, ds.stage, r_dq);
      order.wait();
      wgmma_wait<0>();
      fence_operand(r_dq);
      order.meet();
      add_block(0, ds.stage, to, r_dq);
      to += 64 * 64;
    }
    // Behind the first block the tile's stages are free, or soon will be.
    if (is_loader() && elect_one()) load_tile(tile + 2);
    __syncwarp();
#pragma unroll 1
    for (int block = 1; block < kBlocks; ++block) {
      float r_dq[32];
      issue_block(block, ds.stage, r_dq);
      wgmma_wait<0>();
      fence_operand(r_dq);
      add_block(block, ds.stage, to, r_dq);
      to += 64 * 64;
    }
    order.release(thread);
  }
};

template <class Traits>
__device__ __forceinline__ void produce_wide(const BackwardParams& params,
                                             typename Traits::Shared& shared, const KeyTile& work) {
  const WideProducer<Traits> producer{params,
                                      shared,
                                      work,
                                      thread_in_warpgroup(),
                                      work.query_tiles() * params.heads_per_kv_head,
                                      descriptor(Traits::KTile::kMajorMN, shared.k),
                                      descriptor(Traits::DsTile::kMajorK, shared.ds)};
  producer.load_first();
#pragma unroll 1
  for (int tile = 0; tile < producer.tiles; ++tile) producer.add_dq(tile);
}

}  // namespace flash3::hopper
