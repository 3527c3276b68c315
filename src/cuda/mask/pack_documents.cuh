// SPDX-License-Identifier: Apache-2.0
// Where documents begin, in order, as the sequences of a packed batch have it: one thread block
// counts the runs of all blocks of keys, which the kernel before it has noted.
#pragma once

#include <cub/block/block_scan.cuh>

#include "cuda/device/ptx/sync.cuh"
#include "cuda/mask/by_documents.cuh"
#include "cuda/mask/mask_params.h"

namespace flash3::cuda {

inline constexpr int kPackThreads = 1024;

// Writes where the runs of a block begin, of which `place` come before, as far as there is room.
__device__ __forceinline__ void write_starts(const MaskStarts& starts, const uint4& begins,
                                             long long block, int place) {
  const unsigned words[kBeginWords] = {begins.x, begins.y, begins.z, begins.w};
#pragma unroll
  for (int w = 0; w < kBeginWords; ++w)
    for (unsigned left = words[w]; left != 0 && place < starts.documents; left &= left - 1) {
      const int key = int(block * kMaskBlock) + 32 * w + __ffs(int(left)) - 1;
      starts.q[place] = starts.k[place] = key;
      ++place;
    }
}

// Where there are more documents than there is room for, the last kernel writes all starts anew.
__global__ void __launch_bounds__(kPackThreads)
    pack_documents_kernel(const __grid_constant__ MaskParams p) {
  using Scan = cub::BlockScan<int, kPackThreads>;
  __shared__ Scan::TempStorage scan;
  wait_for_previous_kernel();
  launch_dependents();
  const MaskStarts& starts = p.starts;
  const MaskShape& shape = p.memory.shape;
  const int thread = threadIdx.x;
  int before = 0;
  for (long long first = 0; first < shape.k_blocks(); first += kPackThreads) {
    const long long block = first + thread;
    uint4 begins{0, 0, 0, 0};
    if (block < shape.k_blocks())
      begins = *reinterpret_cast<const uint4*>(begins_of_block(p, block));
    int all, place = __popc(begins.x) + __popc(begins.y) + __popc(begins.z) + __popc(begins.w);
    Scan(scan).ExclusiveSum(place, place, all);
    write_starts(starts, begins, block, before + place);
    before += all;
    __syncthreads();  // the next sum takes the same memory
  }
  for (long long i = min((long long)before, starts.documents) + thread; i < starts.count();
       i += kPackThreads)
    starts.q[i] = starts.k[i] = int(shape.seq_k);
  if (thread != 0) return;
  p.memory.counts->documents = before;
  if (before > starts.documents) p.memory.counts->overflow = kNoRoom;
}

}  // namespace flash3::cuda
