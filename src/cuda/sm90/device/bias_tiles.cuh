// SPDX-License-Identifier: Apache-2.0
// Tiles of a bias of each pair (device/score/bias.cuh), queries × keys, by way of shared memory:
// the copy engine brings a tile while the scores are under way, and ldmatrix hands it out as the
// accumulators of a product lie.
#pragma once

#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/sm90/device/bias_tiles.hpp"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// Where chunk 0 of the tile begins that holds query `row` and key `key` of a sequence first. Rows
// after the sequence are another's or zeros: they are nobody's.
__device__ __forceinline__ BoxAt bias_box(const BiasTiles& tiles, const ListedSequence& s, int head,
                                          int row, int key) {
  return {key, min(head, tiles.heads - 1), tiles.box_rows == 1 ? 0 : s.q_first + row,
          min(s.batch, tiles.batches - 1), false};
}

template <class Tile>
__device__ __forceinline__ int bias_bytes(const BiasTiles& tiles) {
  return tiles.box_rows * Tile::kCols * Tile::kElementBytes;
}
template <class Tile>
__device__ __forceinline__ void load_bias(const BiasTiles& tiles, BoxAt at, uint8_t* shared,
                                          uint64_t* full) {
  const int key = at.dim;
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
    at.dim = key + c * Tile::kChunk;
    tma_load(shared + c * Tile::kChunkBytes, &tiles.map, at, full);
  }
}

// Adds eight elements of a thread, times unit, to as many accumulators.
__device__ __forceinline__ void add_bias_words(const uint32_t (&words)[4], float unit, bool bfloat,
                                               float* r) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    if (bfloat) {
      low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xFFFF0000u);
    } else {
      low = float16_to_float(uint16_t(words[i])), high = float16_to_float(uint16_t(words[i] >> 16));
    }
    r[2 * i] = fmaf(low, unit, r[2 * i]), r[2 * i + 1] = fmaf(high, unit, r[2 * i + 1]);
  }
}

// Adds a tile to a warpgroup's scores, 64 queries × the tile's keys. thread: in the warpgroup.
template <class Tile, int N>
__device__ __forceinline__ void add_bias_tile(const BiasTiles& tiles, const uint8_t* shared,
                                              float unit, bool bfloat, int thread,
                                              float (&r_s)[N]) {
  static_assert(N == Tile::kCols / 2);
  const int lane = thread % 32;
  const int row = tiles.box_rows == 1 ? 0 : thread / 32 * 16 + lane % 16;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(shared));
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += 16) {
    uint32_t words[4];
    ldmatrix_x4(base + Tile::offset(row, col + lane / 16 * 8), words);
    add_bias_words(words, unit, bfloat, &r_s[col / 2]);
  }
}

// The same of transposed scores, 64 keys, from first_key of the tile on, × the tile's queries.
template <class Tile, int N>
__device__ __forceinline__ void add_transposed_bias_tile(const BiasTiles& tiles,
                                                         const uint8_t* shared, float unit,
                                                         bool bfloat, int first_key, int thread,
                                                         float (&r_s)[N]) {
  static_assert(N == Tile::kRows / 2);
  const int lane = thread % 32;
  const int query = lane / 16 * 8 + lane % 8, one_row = tiles.box_rows == 1;
  const int key = first_key + thread / 32 * 16 + lane / 8 % 2 * 8;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(shared));
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    uint32_t words[4];
    ldmatrix_x4_transposed(base + Tile::offset(one_row ? 0 : 16 * j + query, key), words);
    add_bias_words(words, unit, bfloat, &r_s[8 * j]);
  }
}

}  // namespace flash3::cuda::sm90
