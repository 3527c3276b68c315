// SPDX-License-Identifier: Apache-2.0
// The caller's lists of blocks. Their borders are at multiples of 8: a bit in shared memory says
// whether the rows of one caller's block see eight keys.
#pragma once

#include "cuda/mask/query_block.cuh"

namespace flash3::cuda {

struct ByBlocks {
  static constexpr int kMostRanges = 1, kThreads = 256, kMostBlocks = 2048;
  static constexpr bool kNeedsBits = true;
  static constexpr int kMostGroups = kMaskBlock / 8;  // rows of caller's blocks in a block
  static constexpr int kMostOctets = 8192;            // words of 16 bits
  using Ranges = RowRanges<kMostRanges>;
  struct Shared {
    unsigned octets[kMostOctets / 2];  // [groups][blocks of keys] in 16 bits each
  };
  const MaskParams& p;
  const QueryBlock& of;
  Shared& shared;
  unsigned before;  // queries between the first group's first one and the block
  int groups;
  int first_block = 0, blocks = 0;  // of keys, that are prepared

  __device__ __forceinline__ ByBlocks(const MaskParams& params, const QueryBlock& block, Shared& s)
      : p(params), of(block), shared(s) {
    before = unsigned(of.first % p.block_rows);
    groups = int((before + of.rows - 1) / unsigned(p.block_rows)) + 1;
  }
  __device__ __forceinline__ MaskRange range(int, int) const { return {0, kMostInt}; }
  __device__ __forceinline__ int most_blocks() const {
    return min(kMostBlocks, kMostOctets / groups);
  }

  // Blocks of keys [first, first + count). All threads call it.
  __device__ __forceinline__ void prepare(int first, int count) {
    first_block = first, blocks = count;
    __syncthreads();
    for (int i = threadIdx.x; i < (groups * blocks + 1) / 2; i += kThreads) shared.octets[i] = 0;
    __syncthreads();
    constexpr int kWarps = kThreads / 32;
    // Of a group: a divisor of kWarps, whatever the number of groups.
    const int warps = groups == 1   ? kWarps
                      : groups == 2 ? kWarps / 2
                      : groups <= 4 ? kWarps / 4
                                    : 1;
    const int warp = threadIdx.x / 32;
    for (int group = warp / warps; group < groups; group += kWarps / warps)
      add_group(group, warp % warps, warps);
    __syncthreads();
  }

  __device__ __forceinline__ Seen operator()(const Ranges& ranges, const QueryBlock&, int block,
                                             KeyBits (&seen)[4]) const {
    const int first_key = block * kMaskBlock, lane = threadIdx.x % 32;
    const bool listed = lane < groups && octets(lane, block) != 0;
    if (!__any_sync(~0u, listed)) return {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of_lane(lane, i);
      seen[i] = {};
      if (row >= of.rows) continue;
      const int group = int((before + row) / unsigned(p.block_rows));
      seen[i] = KeyBits::of_octets(octets(group, block));
      seen[i].keep(ranges.bits(0, row, first_key));
    }
    return kind_of(ranges, of, first_key, 1, seen);
  }

 private:
  __device__ __forceinline__ unsigned octets(int group, int block) const {
    const int at = group * blocks + block - first_block;
    return shared.octets[at / 2] >> (16 * (at % 2)) & 0xFFFF;
  }

  // One of `warps` warps takes its share of a group's list. Whatever stands there, no address
  // outside of the lists or of shared memory follows from it.
  __device__ __forceinline__ void add_group(int group, int share, int warps) {
    const long long row = of.first / p.block_rows + group;
    const long long count =
        min((long long)__ldg(p.counts.row<int>(of.batch, of.head, 0) + row), p.source.size);
    const int* const list = p.source.row<int>(of.batch, of.head, row);
    const long long all = ceil_div(p.memory.shape.seq_k, p.block_keys);
    for (long long n = share * 32 + threadIdx.x % 32; n < count; n += 32 * warps) {
      const int block = __ldg(list + n);
      if (block < 0 || block >= all) continue;
      const long long begin = block * p.block_keys;
      add_keys(group, begin, min(begin + p.block_keys, p.memory.shape.seq_k));
    }
  }

  // Keys [begin, end) as far as they are prepared.
  __device__ __forceinline__ void add_keys(int group, long long begin, long long end) {
    const int first = int(max(begin / kMaskBlock, (long long)first_block)),
              last = int(min(ceil_div(end, kMaskBlock), (long long)first_block + blocks));
    for (int block = first; block < last; ++block) {
      const long long first_key = (long long)block * kMaskBlock;
      const int from = int(max(begin - first_key, 0ll)) / 8,
                to = int(min(ceil_div(end - first_key, 8), (long long)kMostGroups));
      const unsigned bits = 0xFFFFu >> (16 - (to - from)) << from;
      const int at = group * blocks + block - first_block;
      atomicOr(&shared.octets[at / 2], bits << (16 * (at % 2)));
    }
  }
};

}  // namespace flash3::cuda
