// SPDX-License-Identifier: Apache-2.0
// How FP8 kernels transpose V whose tiles come in parts of 64 keys or so (load_fp8.cuh).
#pragma once

#include "cuda/sm90/forward/load_fp8.cuh"

namespace flash3::cuda::sm90 {

// transpose_part() of a part whose place is a constant: the next patches are on their
// way while one is permuted and stored, without a pause between dims. base: of shared memory, to
// which raw is added after the swizzle, so that one register serves all parts.
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

template <class Traits>
struct PartOfV<Traits, true> {
  static __device__ __forceinline__ void transpose(uint32_t base, uint32_t raw, int from,
                                                   uint32_t transposed, int first_key, int thread) {
    transpose_part_ahead<Traits>(base, (raw - base) + from, transposed, first_key, thread);
  }
};

}  // namespace flash3::cuda::sm90
