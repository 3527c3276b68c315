// SPDX-License-Identifier: Apache-2.0
// V for the tensor cores. An FP8 product reads both operands along the reduction, and P·V reduces
// over keys, but V's rows are along its head dim: two warps of the producer transpose each tile,
// [keys, dims] into [dims, keys], while the consumers work on those before.
//
// A warp takes 32 keys × 16 dims at a time. ldmatrix with .trans hands out 16-bit pairs, two dims
// of one key: of eight keys × eight pairs, lane l has pair l / 4 of keys 2c and 2c + 1, c = l % 4.
// A byte permute of two such matrices, keys 0…7 and 8…15, parts the pair:
//
//   matrix 0   d0 d1 | d0 d1     keys 2c, 2c + 1          ┐    d0 d0 d0 d0    row of dim d0
//   matrix 1   d0 d1 | d0 d1     keys 8 + 2c, 8 + 2c + 1  ┘ ►  d1 d1 d1 d1    row of dim d1
//
// and stmatrix writes bytes 4c…4c + 3 of 16 keys' place in a row. So within 16 keys the order is
//
//   place 4c + i   holds key   2c, 2c + 1, 8 + 2c, 8 + 2c + 1   for i = 0…3
//
// which is the order in which a thread has the scores of a row (tile/mma.cuh): P needs no exchange
// between threads to become the other operand. And within 16 dims the even ones come first, then
// the odd ones, so that stmatrix has no bank conflicts, and so that a thread ends up with four
// neighbouring columns of the output:
//
//   row 16·i + p   is dim   16·i + 2p        row 16·i + 8 + p   is dim   16·i + 2p + 1
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/traits_fp8.cuh"

namespace flash3::cuda::sm90 {

inline constexpr int kTransposeThreads = 64;

// A patch of 32 keys × 16 dims, as stmatrix takes it.
struct Patch {
  uint32_t r[4];
};
__device__ __forceinline__ Patch permuted(const uint32_t (&loaded)[4]) {
  constexpr uint32_t kFirst = 0x6420, kSecond = 0x7531;  // of each pair
  return {__byte_perm(loaded[0], loaded[1], kFirst), __byte_perm(loaded[0], loaded[1], kSecond),
          __byte_perm(loaded[2], loaded[3], kFirst), __byte_perm(loaded[2], loaded[3], kSecond)};
}
__device__ __forceinline__ void store(uint32_t to, const Patch& patch) {
  stmatrix_x4(to, patch.r[0], patch.r[1], patch.r[2], patch.r[3]);
}

// A part of a tile, the keys from first_key on. Each warp transposes every other 16 dims. Addresses
// are those of offset(), without a register for each: the swizzle flips bits of them.
template <class Traits>
__device__ __forceinline__ void transpose_part(uint32_t raw, uint32_t transposed, int first_key,
                                               int thread) {
  using RawVTile = typename Traits::RawVTile;
  using VTile = typename Traits::VTile;
  constexpr int kKeys = RawVTile::kRows;
  constexpr int kBothWarps = 16 * (kTransposeThreads / 32);
  static_assert(RawVTile::kCols % kBothWarps == 0 && kKeys % 32 == 0);
  // Patches on their way together: their loads are all issued before the first is stored.
  constexpr int kRegisters = Traits::kConfig.producer_registers();
  constexpr int kPatches = kRegisters == 32 ? 1 : kKeys % 96 == 0 ? 3 : kKeys % 64 == 0 ? 2 : 1;
  // Few registers do not hold the addresses of several dims, nor of many keys.
  constexpr int kUnrolledDims =
      kRegisters < 32 || Traits::kRawParts > 1 ? 1 : RawVTile::kCols / kBothWarps;
  const int lane = thread % 32, first_dim = thread / 32 * 16;
  raw += RawVTile::offset(lane, first_dim);
  // Matrices of stmatrix: the first and second dims of 16 keys, then of the next 16.
  transposed += VTile::offset(first_dim + lane % 16, lane / 16 * 16);
#pragma unroll kUnrolledDims
  for (int dim = 0; dim < RawVTile::kCols; dim += kBothWarps) {
    const uint32_t from =
        (raw ^ uint32_t(dim % RawVTile::kChunk)) + dim / RawVTile::kChunk * RawVTile::kChunkBytes;
#pragma unroll
    for (int key = 0; key < kKeys; key += 32 * kPatches) {
      uint32_t r[kPatches][4];
#pragma unroll
      for (int i = 0; i < kPatches; ++i)
        ldmatrix_x4_transposed(from + (key + i * 32) * RawVTile::kRowBytes, r[i]);
#pragma unroll
      for (int i = 0; i < kPatches; ++i) {
        const int at = first_key + key + i * 32;
        store((transposed ^ uint32_t(at % VTile::kChunk)) +
                  at / VTile::kChunk * VTile::kChunkBytes + dim * VTile::kRowBytes,
              permuted(r[i]));
      }
    }
  }
}

// The same of a part whose place is a constant, with 64 keys or so: the next patches are on their
// way while one is permuted and stored, without a pause between dims. base: of shared memory, to
// which raw is added behind the swizzle, so that one register serves all parts.
template <class Traits>
__device__ __forceinline__ void transpose_part_ahead(uint32_t base, uint32_t raw,
                                                     uint32_t transposed, int first_key,
                                                     int thread) {
  using RawVTile = typename Traits::RawVTile;
  using VTile = typename Traits::VTile;
  constexpr int kKeys = RawVTile::kRows, kAhead = 2;
  constexpr int kBothWarps = 16 * (kTransposeThreads / 32);
  static_assert(RawVTile::kCols % kBothWarps == 0 && kKeys % (32 * kAhead) == 0);
  const int lane = thread % 32, first_dim = thread / 32 * 16;
  base += RawVTile::offset(lane, first_dim);
  transposed += VTile::offset(first_dim + lane % 16, lane / 16 * 16);
  uint32_t r[kAhead][4];
  const auto load = [&](int dim, int key) {
    ldmatrix_x4_transposed((base ^ uint32_t(dim % RawVTile::kChunk)) +
                               dim / RawVTile::kChunk * RawVTile::kChunkBytes +
                               (raw + key * RawVTile::kRowBytes),
                           r[key / 32 % kAhead]);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(0, 32 * i);
#pragma unroll 1
  for (int next = kBothWarps; next <= RawVTile::kCols; next += kBothWarps) {
    const uint32_t to = transposed + next * VTile::kRowBytes;
#pragma unroll
    for (int key = 0; key < kKeys; key += 32) {
      Patch patch = permuted(r[key / 32 % kAhead]);
      const int key_ahead = key + 32 * kAhead;
      if (key_ahead < kKeys)
        load(next - kBothWarps, key_ahead);
      else if (next < RawVTile::kCols)
        load(next, key_ahead - kKeys);
      const int at = first_key + key;
      store((to ^ uint32_t(at % VTile::kChunk)) + at / VTile::kChunk * VTile::kChunkBytes -
                kBothWarps * VTile::kRowBytes,
            patch);
    }
  }
}

// By kTransposeThreads.
template <class Traits>
__device__ __forceinline__ void transpose_v(typename Traits::Shared& shared, int thread) {
  using RawVTile = typename Traits::RawVTile;
  using VTile = typename Traits::VTile;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(&shared)),
                 raw = uint32_t(__cvta_generic_to_shared(shared.raw_v)),
                 transposed = uint32_t(__cvta_generic_to_shared(shared.v));
  TileReader tiles{shared.tiles};
  // One state for both rings, to spare registers: where tiles come in parts, a part is always in
  // the same stage, and of two stages of tiles the number is the phase of those.
  constexpr bool kInParts = Traits::kRawParts > 1;
  static_assert(kInParts ? Traits::kStages == 2 && Traits::kRawStages == Traits::kRawParts
                         : Traits::kRawStages == Traits::kStages);
  typename Traits::KvState to;
  while (uniform(tiles.next())) {
    int key_tiles = uniform(tiles.tile().key_tile_end - tiles.tile().key_tile_begin);
    tiles.release();
#pragma unroll 1
    for (; key_tiles > 0; --key_tiles) {
#pragma unroll
      for (int part = 0; part < Traits::kRawParts; ++part) {
        const typename Traits::RawState from{kInParts ? part : to.stage,
                                             kInParts ? uint32_t(to.stage) : to.phase};
        wait(&shared.raw_v_barriers.full[from.stage], from.phase, "raw_v_full");
        if (part == 0) wait(&shared.v_barriers.empty[to.stage], to.phase ^ 1, "v_empty");
        const uint32_t to_stage = transposed + to.stage * VTile::kBytes;
        const int first_key = part * RawVTile::kRows;
        if constexpr (kInParts && RawVTile::kRows % 64 == 0)
          transpose_part_ahead<Traits>(base, (raw - base) + from.stage * RawVTile::kBytes, to_stage,
                                       first_key, thread);
        else
          transpose_part<Traits>(raw + from.stage * RawVTile::kBytes, to_stage, first_key, thread);
        arrive(&shared.raw_v_barriers.empty[from.stage]);
      }
      fence_shared_for_async_proxy();
      arrive(&shared.v_barriers.full[to.stage]);
      to.advance();
    }
  }
}

}  // namespace flash3::cuda::sm90
