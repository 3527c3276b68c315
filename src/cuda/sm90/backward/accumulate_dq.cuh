// SPDX-License-Identifier: Apache-2.0
// The warpgroup of wide tiles that computes dQ = dS·K from the consumers' dS, 64 columns at a time,
// and adds it to the sums in global memory from its registers.
#pragma once

#include "cuda/device/ptx/async_copies.cuh"
#include "cuda/sm90/backward/produce_wide.cuh"
#include "cuda/sm90/backward/scores.cuh"
#include "cuda/sm90/backward/walk.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
struct DqAccumulator {
  using KTile = typename Traits::KTile;
  using DsTile = typename Traits::DsTile;
  static constexpr int kBlocks = Traits::kHeadDim / 64;  // of dQ's columns
  static_assert(kBlocks > 1);

  const BackwardParams& params;
  typename Traits::Shared& shared;
  const KeyTile work;  // in registers, so that the loop does not wait for shared memory
  const int thread;
  const Descriptor k_columns, ds_rows;

  // Computes a block and adds it, if deterministic when the blocks before have (produce_wide.cuh).
  // The last one frees dS.
  __device__ __forceinline__ void add_block(int block, int tile, float* to,
                                            bool deterministic) const {
    const int ds_stage = DsState::at(tile).stage;
    float r_dq[32];
    issue_dq_block<Traits::kElement, DsTile, KTile>(r_dq, ds_rows + ds_stage * DsTile::kBytes,
                                                    k_columns + block * KTile::kChunkBytes);
    wgmma_wait<0>();
    fence_operand(r_dq);
    if (deterministic) wait(&shared.dq_ready, SingleState::at(tile).phase, "dq_ready");
    if (block == kBlocks - 1) arrive(&shared.ds_barriers.empty[ds_stage]);
#pragma unroll
    for (int j = 0; j < 8; ++j) add_to_global(to + j * 512, &r_dq[4 * j]);
  }

  __device__ __forceinline__ void add_tile(int tile, const QueryPlace& at) const {
    const bool deterministic = params.schedule.deterministic;
    const DsState ds = DsState::at(tile);
    wait(&shared.ds_barriers.full[ds.stage], ds.phase, "ds_full");
    float* to = DqSums<Traits>(params, work, 0, at).begin() + thread * 4;
    add_block(0, tile, to, deterministic);
#pragma unroll 1
    for (int block = 1; block < kBlocks; ++block) add_block(block, tile, to += 64 * 64, false);
    if (deterministic) arrive(&shared.dq_added);
  }
};

template <class Traits>
__device__ __forceinline__ void accumulate_dq(const BackwardParams& params,
                                              typename Traits::Shared& shared,
                                              const KeyTile& work) {
  const DqAccumulator<Traits> dq{params,
                                 shared,
                                 work,
                                 thread_in_warpgroup(),
                                 descriptor(Traits::KTile::kMajorMN, shared.k[0]),
                                 descriptor(Traits::DsTile::kMajorK, shared.ds)};
  const int tiles = query_steps<Traits>(params, work);
  WidePlace<Traits> at(params, work);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    dq.add_tile(tile, at);
    at.advance(params, dq.work);
  }
}

}  // namespace flash3::cuda::sm90
