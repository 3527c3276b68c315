// SPDX-License-Identifier: Apache-2.0
// K and V in e4m3 on their way to the tensor cores: two warps of the producer make them 16-bit,
// exactly, while the consumers work on the tiles before. Scales are the consumers' matter.
#pragma once

#include "cuda/device/ptx/e4m3.cuh"
#include "cuda/device/ptx/words.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/traits_widened.cuh"

namespace flash3::cuda::sm90 {

inline constexpr int kWideningThreads = 64;

// Two e4m3 values, exactly, to two of T.
template <Element T>
__device__ __forceinline__ uint32_t widen2(uint16_t pair) {
  const uint32_t halves = e4m3_to_float16(pair);
  if constexpr (T == Element::kFloat16) return halves;
  return pack2<T>(float16_to_float(uint16_t(halves)), float16_to_float(uint16_t(halves >> 16)));
}

// Stores eight of them.
template <Element T>
__device__ __forceinline__ void store_wider(uint32_t address, uint32_t low, uint32_t high) {
  store_shared_16(address, {widen2<T>(uint16_t(low)), widen2<T>(uint16_t(low >> 16)),
                            widen2<T>(uint16_t(high)), widen2<T>(uint16_t(high >> 16))});
}

// Widens the rows of a raw tile into those of a tile, from the row at `wide` on. Eight threads have
// as many rows, so that the swizzle spreads what they read and write at once over all banks; a
// thread takes 16 columns at a time, always the same place in a chunk of columns and in so many
// rows, so that all its addresses are constants apart. Loads go ahead of the conversions.
template <Element T, class Tile, class RawTile>
__device__ __forceinline__ void widen_rows(uint32_t raw, uint32_t wide, uint32_t thread) {
  constexpr int kPieces = RawTile::kChunk / RawTile::kPiece;  // of a row, in a chunk
  constexpr int kRowsAtOnce = kWideningThreads / kPieces;
  constexpr int kSteps = RawTile::kRows / kRowsAtOnce, kAtOnce = kSteps < 4 ? kSteps : 4;
  static_assert(kRowsAtOnce % 8 == 0 && kSteps % kAtOnce == 0 &&
                RawTile::kChunk % Tile::kChunk == 0);
  const int row = int(thread % 8 + thread / 8 / kPieces % (kRowsAtOnce / 8) * 8),
            column = int(thread / 8 % kPieces) * RawTile::kPiece;
  raw += RawTile::offset(row, column);
  wide += Tile::offset(row, column);
#pragma unroll
  for (int chunk = 0; chunk < RawTile::kChunks; ++chunk)
#pragma unroll
    for (int step = 0; step < kSteps; step += kAtOnce) {
      uint4 bytes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        bytes[i] = load_shared_16(raw + chunk * RawTile::kChunkBytes +
                                  (step + i) * kRowsAtOnce * RawTile::kRowBytes);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t to = chunk * (RawTile::kChunk / Tile::kChunk) * Tile::kChunkBytes +
                            (step + i) * kRowsAtOnce * Tile::kRowBytes;
        store_wider<T>(wide + to, bytes[i].x, bytes[i].y);
        store_wider<T>((wide ^ 16) + to, bytes[i].z, bytes[i].w);  // the next piece
      }
    }
}

// Widens one tile of K or V, into `wide`, the stage of this state of the ring.
template <class Traits, class Tile, class RawTile>
__device__ __forceinline__ void widen_tile(typename Traits::Shared& shared,
                                           uint8_t (&wide)[Traits::kStages][Tile::kBytes],
                                           RingBarriers<Traits::kStages>& ring, const char* empty,
                                           const typename Traits::KvState& to, bool is_k,
                                           typename Traits::RawState& from, int thread) {
#pragma unroll 1
  for (int part = 0; part < Traits::kRawParts; ++part, from.advance()) {
    wait(&shared.raw_barriers.full[from.stage], from.phase, "raw_full");
    if (part == 0) wait(&ring.empty[to.stage], to.phase ^ 1, empty);
    if (is_k && part == 0 && thread == 0)
      shared.key_scales[to.phase][to.stage] = shared.raw_scales[from.stage];
    widen_rows<Traits::kElement, Tile, RawTile>(
        uint32_t(__cvta_generic_to_shared(shared.raw[from.stage])),
        uint32_t(__cvta_generic_to_shared(wide[to.stage])) +
            part * Traits::kRawRows * Tile::kRowBytes,
        uint32_t(hide_from_optimizer(thread)));
    arrive(&shared.raw_barriers.empty[from.stage]);
  }
  fence_shared_for_async_proxy();
  arrive(&ring.full[to.stage]);
}

// By kWideningThreads, in the order in which the loader brings the halves (load_widened.cuh).
template <class Traits>
__device__ __forceinline__ void widen_keys(typename Traits::Shared& shared, int thread) {
  TileReader tiles{shared.tiles};
  typename Traits::RawState from;
  int widened = 0;  // tiles of K, and of V; a number has fewer registers than a state
  while (uniform(tiles.next())) {
    int key_tiles = uniform(tiles.tile().key_tile_end - tiles.tile().key_tile_begin);
    tiles.release();
#pragma unroll 1
    for (; key_tiles > 0; --key_tiles, ++widened) {
      const auto to = Traits::KvState::at(widened);
      widen_tile<Traits, typename Traits::KTile, typename Traits::RawKTile>(
          shared, shared.k, shared.k_barriers, "k_empty", to, true, from, thread);
      widen_tile<Traits, typename Traits::VTile, typename Traits::RawVTile>(
          shared, shared.v, shared.v_barriers, "v_empty", to, false, from, thread);
    }
  }
}

}  // namespace flash3::cuda::sm90
