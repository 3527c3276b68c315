// SPDX-License-Identifier: Apache-2.0
// A bit for each pair, of all of them or of some blocks. A warp looks at a block, and each lane at
// four of its rows, of 16 bytes.
#pragma once

#include "cuda/mask/query_block.cuh"

namespace flash3::cuda {

// kOfBlocks: the source says which block of bits a block of keys has.
template <bool kOfBlocks>
struct ByBits {
  static constexpr int kMostRanges = 1, kThreads = 256, kMostBlocks = 2048;
  static constexpr bool kNeedsBits = true;
  using Ranges = RowRanges<kMostRanges>;
  struct Shared {};
  const MaskParams& p;
  const QueryBlock& of;

  __device__ __forceinline__ ByBits(const MaskParams& params, const QueryBlock& block, Shared&)
      : p(params), of(block) {}
  __device__ __forceinline__ MaskRange range(int, int) const { return {0, kMostInt}; }
  __device__ __forceinline__ int most_blocks() const { return kMostBlocks; }
  __device__ __forceinline__ void prepare(int, int) const {}

  __device__ __forceinline__ Seen operator()(const Ranges& ranges, const QueryBlock&, int block,
                                             KeyBits (&seen)[4]) const {
    const int first_key = block * kMaskBlock;
    int number = kAllPairsSeen;
    if constexpr (kOfBlocks) {
      number = __ldg(p.source.row<int>(of.batch, of.head, of.block) + block);
      if (number != kAllPairsSeen && (number < 0 || number >= p.block_bits.blocks)) return {};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of_lane(threadIdx.x % 32, i);
      seen[i] = {};
      if (row >= of.rows) continue;
      if constexpr (kOfBlocks)
        seen[i] = number == kAllPairsSeen ? KeyBits::of(0, kMaskBlock)
                                          : read(p.block_bits.row(number, row), kMaskBytes);
      else
        seen[i] = read(p.source.row<unsigned char>(of.batch, of.head, of.first + row) +
                           (long long)block * kMaskBytes,
                       min((long long)kMaskBytes, p.source.size - (long long)block * kMaskBytes));
      seen[i].keep(ranges.bits(0, row, first_key));
    }
    return kind_of(ranges, of, first_key, 1, seen);
  }

 private:
  static constexpr int kMaskBytes = kMaskBlock / 8;

  // The first `count` of a row's bytes, the others 0.
  __device__ __forceinline__ KeyBits read(const unsigned char* bytes, long long count) const {
    KeyBits bits{};
    if (p.in_vectors && count == kMaskBytes) {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(bytes));
      bits.words[0] = words.x, bits.words[1] = words.y;
      bits.words[2] = words.z, bits.words[3] = words.w;
      return bits;
    }
#pragma unroll
    for (int n = 0; n < kMaskBytes; ++n)
      if (n < count) bits.words[n / 4] |= unsigned(__ldg(bytes + n)) << (8 * (n % 4));
    return bits;
  }
};

}  // namespace flash3::cuda
