// SPDX-License-Identifier: Apache-2.0
// A byte for each pair. A warp reads a block of them, 128 rows of 128 bytes, and keeps a bit of
// each.
#pragma once

#include "cuda/mask/query_block.cuh"

namespace flash3::cuda {

struct ByDense {
  // Blocks of queries are few where they are large: each has many loads under way.
  static constexpr int kMostRanges = 1, kThreads = 512, kMostBlocks = 1024;
  static constexpr bool kNeedsBits = true;
  using Ranges = RowRanges<kMostRanges>;
  struct Shared {
    KeyBits rows[kThreads / 32][kMaskBlock];  // of each warp
  };
  const MaskParams& p;
  const QueryBlock& of;
  KeyBits* const rows;

  __device__ __forceinline__ ByDense(const MaskParams& params, const QueryBlock& block,
                                     Shared& shared)
      : p(params), of(block), rows(shared.rows[threadIdx.x / 32]) {}
  __device__ __forceinline__ MaskRange range(int, int) const { return {0, kMostInt}; }
  __device__ __forceinline__ int most_blocks() const { return kMostBlocks; }
  __device__ __forceinline__ void prepare(int, int) const {}

  __device__ __forceinline__ Seen operator()(const Ranges& ranges, const QueryBlock&, int block,
                                             KeyBits (&seen)[4]) const {
    const int first_key = block * kMaskBlock;
    __syncwarp();  // the rows of the last block have been read
    if (p.in_vectors && p.memory.shape.seq_k - first_key >= kMaskBlock)
      read_vectors(first_key);
    else
      read_bytes(first_key);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of_lane(threadIdx.x % 32, i);
      seen[i] = {};
      if (row >= of.rows) continue;
      seen[i] = rows[row];
      seen[i].keep(ranges.bits(0, row, first_key));
    }
    return kind_of(ranges, of, first_key, 1, seen);
  }

 private:
  __device__ __forceinline__ const unsigned char* keys_of(int row, int first_key) const {
    return p.source.row<unsigned char>(of.batch, of.head, of.first + row) + first_key;
  }

  // Eight lanes a row.
  __device__ __forceinline__ void read_vectors(int first_key) const {
    constexpr int kAtOnce = 16, kRowsAtOnce = 4 * kAtOnce;
    const int lane = threadIdx.x % 32, part = lane % 8;
    auto* const octets = reinterpret_cast<unsigned short*>(rows);
    for (int first = 0; first < of.rows; first += kRowsAtOnce) {
      uint4 bytes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + 4 * i + lane / 8;
        bytes[i] = uint4{};
        if (row < of.rows)
          bytes[i] = __ldcs(reinterpret_cast<const uint4*>(keys_of(row, first_key)) + part);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + 4 * i + lane / 8;
        octets[row * 8 + part] =
            (unsigned short)(nonzero_bytes(bytes[i].x) | nonzero_bytes(bytes[i].y) << 4 |
                             nonzero_bytes(bytes[i].z) << 8 | nonzero_bytes(bytes[i].w) << 12);
      }
    }
  }

  // All lanes a row, a byte each.
  __device__ __forceinline__ void read_bytes(int first_key) const {
    constexpr int kRowsAtOnce = 8, kParts = kMaskBlock / 32;
    const int lane = threadIdx.x % 32;
    const int left = int(min((long long)kMaskBlock, p.memory.shape.seq_k - first_key));
    auto* const words = reinterpret_cast<unsigned*>(rows);
    for (int first = 0; first < of.rows; first += kRowsAtOnce) {
      unsigned char bytes[kRowsAtOnce * kParts];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce * kParts; ++i) {
        const int row = first + i / kParts, key = i % kParts * 32 + lane;
        bytes[i] = 0;
        if (row < of.rows && key < left) bytes[i] = __ldcs(keys_of(row, first_key) + key);
      }
      unsigned own = 0;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce * kParts; ++i) {
        const unsigned word = __ballot_sync(~0u, bytes[i] != 0);
        if (lane == i) own = word;
      }
      words[first * kParts + lane] = own;
    }
  }
};

}  // namespace flash3::cuda
