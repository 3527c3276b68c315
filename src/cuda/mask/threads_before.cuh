// SPDX-License-Identifier: Apache-2.0
// Writing in order what some threads of a block have.
#pragma once

namespace flash3::cuda {

// In shared memory.
template <int kThreads>
struct ThreadsBefore {
  static constexpr int kWarps = kThreads / 32;
  int of_warp[kWarps];

  // How many threads before this one say so, and in *all how many of the block. All threads call
  // it.
  __device__ __forceinline__ int count(bool says_so, int* all) {
    const unsigned own = __ballot_sync(~0u, says_so);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();  // the last call has been read
    if (lane == 0) of_warp[warp] = __popc(own);
    __syncthreads();
    int before = 0;
    *all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += of_warp[w];
      *all += of_warp[w];
    }
    return before + __popc(own & ((1u << lane) - 1));
  }
};

}  // namespace flash3::cuda
