// SPDX-License-Identifier: Apache-2.0
// Documents: runs of equal numbers. A first kernel notes of each block of keys where the first and
// the last run begin in it, in the memory of the block's list, which comes later; who looks for the
// ends of a run reads these instead of all numbers.
#pragma once

#include "cuda/mask/by_ranges.cuh"

namespace flash3::cuda {

// Key `key` begins a run. In [0, seq_k).
__device__ __forceinline__ bool begins_run(const int* numbers, long long key) {
  return key == 0 || __ldg(numbers + key) != __ldg(numbers + key - 1);
}

// In place of the list of a block of keys; -1: none begins there.
struct RunsOfBlock {
  int last, first;
};
__device__ __forceinline__ MaskList* runs_of_block(const MaskParams& p, int batch,
                                                   long long block) {
  return p.memory.key_list(batch, 0, block);
}

// The numbers of a sequence's keys.
__device__ __forceinline__ const int* document_numbers(const MaskParams& p, int batch,
                                                       long long first_key) {
  return p.source.row<int>(batch, 0, 0) + first_key;
}

// A bit for each key of a block that begins a run, for pack_documents_kernel, in place of the
// ranges that queries of the block get later: there are as many queries as keys.
constexpr int kBeginWords = kMaskBlock / 32;
__device__ __forceinline__ unsigned* begins_of_block(const MaskParams& p, long long block) {
  return reinterpret_cast<unsigned*>(p.memory.range(0, 0, 0, block * kMaskBlock));
}

// A warp notes those of one block.
__device__ __forceinline__ void note_runs(const MaskParams& p, int batch, long long block) {
  const RowRange keys = rows_of(p.k, batch);
  const int* const numbers = document_numbers(p, batch, keys.first);
  const int lane = threadIdx.x % 32;
  RunsOfBlock runs{-1, -1};
#pragma unroll
  for (int i = 0; i < kBeginWords; ++i) {
    const long long first = block * kMaskBlock + 32 * i, key = first + lane;
    const unsigned begin = __ballot_sync(~0u, key < keys.length && begins_run(numbers, key));
    if (lane == 0 && p.starts.documents > 0) begins_of_block(p, block)[i] = begin;
    if (begin == 0) continue;
    runs.last = int(first) + 31 - __clz(begin);
    if (runs.first < 0) runs.first = int(first) + __ffs(begin) - 1;
  }
  if (lane == 0) *runs_of_block(p, batch, block) = {runs.last, runs.first};
}

struct ByDocuments : OfRanges<1> {
  struct Shared {
    unsigned begins[kBeginWords];  // a bit for each row whose key begins a run
    int before, after;             // where the last run before these keys begins, the next after
  };
  const MaskParams& p;
  const QueryBlock& of;
  Shared& shared;
  const int* numbers;
  long long first_key;  // of the first row; may lie outside

  __device__ __forceinline__ ByDocuments(const MaskParams& params, const QueryBlock& block,
                                         Shared& s)
      : p(params),
        of(block),
        shared(s),
        numbers(document_numbers(params, block.batch, block.k_first)),
        first_key(block.first + block.k_length - block.q_length) {
    const int thread = threadIdx.x;
    if (thread == 0) shared.before = -1, shared.after = kMostInt;
    if (thread < kMaskBlock) {
      const unsigned begin = __ballot_sync(~0u, is_begin(first_key + thread));
      if (thread % 32 == 0) shared.begins[thread / 32] = begin;
    }
    __syncthreads();
    find_runs_around();
  }

  __device__ __forceinline__ MaskRange range(int, int row) const {
    const long long key = first_key + row;
    if (key < 0 || key >= of.k_length) return {0, 0};
    MaskRange run{shared.before, shared.after};
    const KeyBits up_to_row = KeyBits::of(0, row + 1);
#pragma unroll
    for (int w = 0; w < kBeginWords; ++w) {
      const unsigned begins = shared.begins[w] & up_to_row.words[w];
      if (begins != 0) run.begin = int(first_key + 32 * w + 31 - __clz(begins));
    }
#pragma unroll
    for (int w = kBeginWords - 1; w >= 0; --w) {
      const unsigned begins = shared.begins[w] & ~up_to_row.words[w];
      if (begins != 0) run.end = int(first_key + 32 * w + __ffs(begins) - 1);
    }
    return run;
  }
  __device__ __forceinline__ int most_blocks() const { return kMostBlocks; }
  __device__ __forceinline__ void prepare(int, int) const {}
  __device__ __forceinline__ Seen operator()(const Ranges& ranges, const QueryBlock& rows,
                                             int block, KeyBits (&seen)[4]) const {
    return look(ranges, rows, block * kMaskBlock, seen);
  }

 private:
  __device__ __forceinline__ bool is_begin(long long key) const {
    return key >= 0 && key < of.k_length && begins_run(numbers, key);
  }

  // From the rows' keys outwards: what is left of the block of keys there, then whole blocks.
  __device__ __forceinline__ void find_runs_around() {
    const long long k_blocks = p.memory.shape.k_blocks();
    const long long end_key = first_key + kMaskBlock;
    const bool has_before = first_key > 0, has_after = end_key > 0 && end_key < of.k_length;
    const long long block_before = has_before ? first_key / kMaskBlock : 0,
                    block_after = has_after ? end_key / kMaskBlock : k_blocks;
    const int thread = threadIdx.x;
    int before = -1, after = kMostInt;
    if (thread < kMaskBlock) {
      const long long key = first_key - 1 - thread, next = end_key + thread;
      if (has_before && key >= block_before * kMaskBlock && is_begin(key)) before = int(key);
      if (has_after && next < (block_after + 1) * kMaskBlock && is_begin(next)) after = int(next);
    }
    for (long long step = 0;; step += kThreads) {
      const long long down = block_before - 1 - step - thread, up = block_after + 1 + step + thread;
      if (down >= 0) before = max(before, runs_of_block(p, of.batch, down)->begin);
      if (up < k_blocks) {
        const int first = runs_of_block(p, of.batch, up)->count;
        if (first >= 0) after = min(after, first);
      }
      before = __reduce_max_sync(~0u, before);
      after = __reduce_min_sync(~0u, after);
      if (thread % 32 == 0) atomicMax(&shared.before, before), atomicMin(&shared.after, after);
      __syncthreads();
      const bool found_before = shared.before >= 0 || block_before - 1 - step - kThreads < 0,
                 found_after =
                     shared.after != kMostInt || block_after + 1 + step + kThreads >= k_blocks;
      if (found_before && found_after) break;
      __syncthreads();
    }
  }
};

}  // namespace flash3::cuda
