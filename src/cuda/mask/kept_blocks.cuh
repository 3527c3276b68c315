// SPDX-License-Identifier: Apache-2.0
// Blocks that a thread block has looked at, and writing those that are seen, in order.
#pragma once

#include "core/mask_lists.hpp"

namespace flash3::cuda {

// In shared memory.
template <int kThreads, int kMost>
struct KeptBlocks {
  MaskBlock blocks[kMost];
  int seen_of_warp[kThreads / 32];

  // Without quarters: the block is not seen.
  __device__ __forceinline__ void keep(int i, const MaskBlock& block) { blocks[i] = block; }

  // Writes those of the first `count` that are seen; where the next ones go. All threads call it,
  // after a barrier.
  __device__ __forceinline__ MaskBlock* write(int count, MaskBlock* to) {
    for (int first = 0; first < count; first += kThreads) {
      const int i = first + int(threadIdx.x);
      const bool seen = i < count && blocks[i].quarters() != 0;
      int all = 0;
      const int before = threads_before(seen, &all);
      if (seen) to[before] = blocks[i];
      to += all;
    }
    return to;
  }

 private:
  // How many threads before this one say so, and in *all how many of the block.
  __device__ __forceinline__ int threads_before(bool says_so, int* all) {
    const unsigned own = __ballot_sync(~0u, says_so);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();  // the last numbers have been read
    if (lane == 0) seen_of_warp[warp] = __popc(own);
    __syncthreads();
    int before = 0;
    *all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += seen_of_warp[w];
      *all += seen_of_warp[w];
    }
    return before + __popc(own & ((1u << lane) - 1));
  }
};

}  // namespace flash3::cuda
