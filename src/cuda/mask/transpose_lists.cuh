// SPDX-License-Identifier: Apache-2.0
// The lists of blocks of keys, from those of blocks of queries. A thread block has one: each thread
// looks for the block of keys in the list of a block of queries at a time.
#pragma once

#include "cuda/device/ptx/sync.cuh"
#include "cuda/mask/kept_blocks.cuh"
#include "cuda/mask/mask_params.h"

namespace flash3::cuda {

inline constexpr int kTransposeThreads = 256;

// The block of keys in a list, whose blocks ascend; false: it is not there. As they differ, few
// places are left for it, in a list without gaps one.
__device__ __forceinline__ bool find_block(const MaskMemory& memory, const MaskList& list,
                                           int block, MaskBlock* found) {
  if (list.count == 0) return false;
  const MaskBlock* const blocks = memory.blocks + list.begin;
  int first = max(0, list.count - 1 - (blocks[list.count - 1].block() - block)),
      last = min(list.count - 1, block - blocks[0].block());
  while (first <= last) {
    const int middle = (first + last) / 2;
    *found = blocks[middle];
    if (found->block() == block) return true;
    if (found->block() < block)
      first = middle + 1;
    else
      last = middle - 1;
  }
  return false;
}

struct ListTransposer {
  static constexpr int kThreads = kTransposeThreads, kMostBlocks = 2048;

  struct Shared {
    KeptBlocks<kThreads, kMostBlocks> kept;  // of queries
    int found, begin;
  };

  const MaskMemory& memory;
  Shared& shared;

  // Looks at blocks [first, first + count) of queries; how many of a thread's see the keys.
  __device__ __forceinline__ int look(int batch, int head, int block, int first, int count) const {
    int found = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      MaskBlock of{};
      const bool sees = find_block(memory, *memory.list(batch, head, first + i), block, &of);
      found += sees;
      shared.kept.keep(i, sees ? of.as_seen_from(first + i) : MaskBlock{});
    }
    return found;
  }

  __device__ __forceinline__ void make(long long list) const {
    const MaskShape& shape = memory.shape;
    const long long pair = list / shape.k_blocks();
    const int block = int(list - pair * shape.k_blocks()), q_blocks = int(shape.q_blocks());
    const int batch = int(pair / shape.heads), head = int(pair % shape.heads);
    const bool once = q_blocks <= kMostBlocks;  // else it looks again

    if (threadIdx.x == 0) shared.found = 0;
    __syncthreads();
    int found = 0;
    for (int at = 0; at < q_blocks; at += kMostBlocks)
      found += look(batch, head, block, at, min(kMostBlocks, q_blocks - at));
    found = __reduce_add_sync(~0u, found);
    if (threadIdx.x % 32 == 0 && found != 0) atomicAdd(&shared.found, found);
    __syncthreads();
    found = shared.found;
    if (threadIdx.x == 0) {
      shared.begin = found == 0 ? 0 : atomicAdd(&memory.counts->key_blocks, found);
      *memory.key_list(batch, head, block) = {shared.begin, found};
    }
    __syncthreads();
    MaskBlock* to = memory.key_blocks + shared.begin;
    for (int at = 0; at < q_blocks && found != 0; at += kMostBlocks) {
      const int count = min(kMostBlocks, q_blocks - at);
      if (!once) {
        __syncthreads();  // what was looked at before has been written
        look(batch, head, block, at, count);
        __syncthreads();
      }
      to = shared.kept.write(count, to);
    }
  }
};

// A mask without room lists nothing; its counts say what it needs.
__device__ __forceinline__ void empty_lists(const MaskMemory& memory, const MaskStarts& starts,
                                            int overflow) {
  const MaskShape& shape = memory.shape;
  const long long threads = (long long)gridDim.x * kTransposeThreads,
                  thread = (long long)blockIdx.x * kTransposeThreads + threadIdx.x;
  for (long long i = thread; i < shape.lists(); i += threads) memory.lists[i] = {0, 0};
  for (long long i = thread; i < shape.key_lists(); i += threads) memory.key_lists[i] = {0, 0};
  for (long long i = thread; i < starts.count(); i += threads) starts.set_empty(shape, i);
  if (thread != 0) return;
  constexpr int kMost = 0x7FFFFFFF;
  if (overflow & kManyBlocks) memory.counts->blocks = kMost;
  if (overflow & kManyPartialBlocks) memory.counts->partial_blocks = kMost;
  memory.counts->key_blocks = memory.counts->blocks;
  memory.counts->overflow = 1;
}

__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const __grid_constant__ MaskParams p) {
  __shared__ ListTransposer::Shared shared;
  wait_for_previous_kernel();
  launch_dependents();
  // Another block may bring it to 1; it stays what it is otherwise.
  const int overflow = *static_cast<const volatile int*>(&p.memory.counts->overflow);
  if (overflow != 0) return empty_lists(p.memory, p.starts, overflow);
  const ListTransposer transposer{p.memory, shared};
  for (long long list = blockIdx.x; list < p.memory.shape.key_lists(); list += gridDim.x) {
    __syncthreads();  // nothing of the last list is read any more
    transposer.make(list);
  }
}

}  // namespace flash3::cuda
