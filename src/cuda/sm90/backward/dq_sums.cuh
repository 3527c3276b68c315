// SPDX-License-Identifier: Apache-2.0
// The float32 sums of dQ in the workspace, to which all blocks that see a query tile add, and the
// semaphore that orders them.
#pragma once

#include "cuda/sm90/backward/lists.cuh"
#include "cuda/sm90/backward/load.cuh"
#include "cuda/sm90/device/pipeline.cuh"

namespace flash3::cuda::sm90 {

// A counter in global memory. One thread of a block uses it on behalf of the others.
struct DqSemaphore {
  // What the counter holds once the block that claimed the sums has stored its dQ.
  static constexpr int kStored = 2;

  int* count;

  __device__ __forceinline__ bool is_ready(int order) const { return load_acquire(count) >= order; }
  __device__ __forceinline__ void wait(int order) const {
    wait_until_at_least(count, order, "dq_semaphore");
  }
  // Releases what this thread has added. It counts and does not store the order, so that no block
  // waits forever where cu_seqlens make sequences overlap.
  __device__ __forceinline__ void release() const { add_release(count, 1); }
  // Sums that are not zero-initialised: true for the first block that asks. It stores its dQ.
  __device__ __forceinline__ bool claim() const { return exchange_if(count, 0, 1) == 0; }
};

// The sums of the i-th query tile of a block's walk. `part` chooses the semaphore: the consumer
// warpgroups add their halves of dQ independently.
template <class Traits>
struct DqSums {
  const BackwardParams& params;
  const KeyTile& work;
  int part;
  int head;   // among all query heads
  int tile;   // in the sequence
  int index;  // among all query tiles in the workspace

  __device__ __forceinline__ DqSums(const BackwardParams& p, const KeyTile& w, int which_part,
                                    const QueryPlace& at)
      : params(p), work(w), part(which_part), head(at.head), tile(at.tile), index(at.index) {}

  __device__ __forceinline__ float* begin() const {
    return params.workspace.dq + int64_t(index) * (Traits::kTileM * Traits::kConfig.dq_columns());
  }
  // Deterministic: how many blocks add before this one.
  __device__ __forceinline__ int order() const {
    if constexpr (Traits::kLists) return listed_dq_order<Traits>(params, work, head, tile);
    return dq_order(params.schedule, work, Traits::kTileN, Traits::kBand, tile);
  }
  __device__ __forceinline__ DqSemaphore semaphore() const {
    return {params.workspace.dq_semaphores + int64_t(index) * kDqParts + part};
  }
};

}  // namespace flash3::cuda::sm90
