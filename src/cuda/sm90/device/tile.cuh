// SPDX-License-Identifier: Apache-2.0
// A [rows, cols] tile in shared memory, as TMA writes it and wgmma reads it; the products, and the
// copies.
//
// The columns are cut into chunks as wide as the swizzle (128 bytes, or 64 where a row is no
// multiple of that); chunk c is a contiguous [rows, chunk] block, its 16-byte pieces permuted
// within groups of eight rows:
//
//   byte(row, col) = (col / kChunk) · rows · swizzle + row · swizzle
//                    + 16 · ((col % kChunk / kPiece) ^ xor(row)) + kElementBytes · (col % kPiece)
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/device/ptx/copies.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/types.hpp"
#include "cuda/sm90/device/pipeline.cuh"

namespace flash3::cuda::sm90 {

template <int kRows_, int kCols_, int kElementBytes_ = 2>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kElementBytes = kElementBytes_;
  static constexpr Swizzle kSwizzle =
      kCols * kElementBytes % 128 == 0 ? Swizzle::k128B : Swizzle::k64B;
  static constexpr int kRowBytes = swizzle_bytes(kSwizzle);
  static constexpr int kChunk = kRowBytes / kElementBytes;  // columns
  static constexpr int kPiece = 16 / kElementBytes;         // columns of 16 bytes
  static constexpr int kStep = 32 / kElementBytes;          // of the reduction, in one wgmma
  static constexpr int kChunks = kCols / kChunk;
  static constexpr int kChunkBytes = kRows * kRowBytes;
  static constexpr int kBytes = kRows * kCols * kElementBytes;
  static_assert(kCols % kChunk == 0 && kRows % 8 == 0);

  // Descriptor of the operand whose inner (contiguous) dimension is the reduction: Q, and K in
  // Q·Kᵀ.
  static constexpr Descriptor kMajorK = descriptor_layout(kSwizzle, 16, 8 * kRowBytes);
  // Byte offset of the kStep columns that start at col, a multiple of kStep.
  static FLASH3_HOST_DEVICE constexpr int k_step(int col) {
    return (col / kChunk) * kChunkBytes + (col % kChunk) * kElementBytes;
  }

  // Descriptor of the operand whose rows are the reduction: V in P·V. Leading offset: from one
  // chunk of columns to the next.
  static constexpr Descriptor kMajorMN = descriptor_layout(kSwizzle, kChunkBytes, 8 * kRowBytes);
  // Byte offset of the 16 rows that start at row (a multiple of 16).
  static FLASH3_HOST_DEVICE constexpr int mn_step(int row) { return row * kRowBytes; }

  // Byte offset of an element; col a multiple of kPiece.
  static FLASH3_HOST_DEVICE constexpr int offset(int row, int col) {
    const int piece = col % kChunk / kPiece;
    const int flip = kSwizzle == Swizzle::k128B ? row % 8 : row / 2 % 4;
    return (col / kChunk) * kChunkBytes + row * kRowBytes + ((piece ^ flip) * 16);
  }
};

// ---- products: of 64 rows, a warpgroup's, in fragments of accumulators (score/view.hpp) ----
// Thread t has rows r0 = 16·(t / 32) + t % 32 / 4 and r0 + 8 (PTX ISA 9.7.15.5.2.2, m64nN); element
// 4j + 2h + e is row r0 + 8h, column 8j + 2·(t % 4) + e.

inline constexpr int kWarpgroupRows = 64;

// Gives a tile's descriptor its address.
__device__ __forceinline__ Descriptor descriptor(Descriptor layout, const void* shared) {
  return layout + int(__cvta_generic_to_shared(shared));
}

// Issues D = A·Bᵀ, 64 rows of ATile by the rows of BTile, and commits it as one group: S = Q·Kᵀ, or
// its transpose, or dPᵀ = V·dOutᵀ.
template <Element T, class ATile, class BTile>
__device__ __forceinline__ void issue_abt(float (&r)[BTile::kRows / 2], Descriptor a,
                                          Descriptor b) {
  static_assert(ATile::kCols == BTile::kCols);
  mark_undefined(r);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < ATile::kCols; col += ATile::kStep) {
    Wgmma<T, BTile::kRows>::ss(r, a + ATile::k_step(col), b + BTile::k_step(col), col != 0);
  }
  wgmma_commit();
}

// Issues D += A·B, A [64, BTile::kRows] packed by pack_probabilities, and commits it as one group:
// O += P·V, dV += Pᵀ·dOut or dK += dSᵀ·Q.
template <Element T, class BTile>
__device__ __forceinline__ void issue_add_ab(float (&r)[BTile::kCols / 2],
                                             uint32_t (&r_a)[BTile::kRows / 4], Descriptor b) {
  fence_operand(r);
  fence_operand(r_a);
  wgmma_fence();
#pragma unroll
  for (int row = 0; row < BTile::kRows; row += 16) {
    Wgmma<T, BTile::kCols>::rs(r, &r_a[row / 4], b + BTile::mn_step(row), true);
  }
  wgmma_commit();
}

// Stores the first `columns` columns of row r0 + 8h of a fragment in float32; in_pairs: each two of
// a row lie in 8 aligned bytes.
template <int N>
__device__ __forceinline__ void store_fragment_row(float* row, const float (&r)[N], int h,
                                                   int columns, bool in_pairs, int thread) {
#pragma unroll
  for (int i = 2 * h; i < N; i += 4) {
    const int col = i / 4 * 8 + thread % 4 * 2;
    if (in_pairs && col + 1 < columns) {
      *reinterpret_cast<float2*>(row + col) = make_float2(r[i], r[i + 1]);
    } else {
      if (col < columns) row[col] = r[i];
      if (col + 1 < columns) row[col + 1] = r[i + 1];
    }
  }
}

// The score accumulator is, element for element, the A operand of the next product: only rounding
// is needed.
template <Element T, int N>
__device__ __forceinline__ void pack_probabilities(const float (&r_s)[N], uint32_t (&r_p)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) r_p[i] = pack2<T>(r_s[2 * i], r_s[2 * i + 1]);
}

// ---- copies: one thread issues; what lies outside the tensor is read as zero, never written ----

// Where a box begins in a map (RowMap): (dim, head, row, batch), of a ragged one (dim, head, y, x).
struct BoxAt {
  int32_t dim, head, y, x;
  bool ragged;
};

// The rows of a sequence from `row` on, of a head or of a group's first head. Where all have one
// length the tensor ends with them. A ragged map has all rows of the tensor twice, as x and as y,
// and y ends at kRaggedEnd: the box begins so far before it as the sequence has rows left, and x
// makes up for it. A last coordinate takes kRaggedEnd rows off again: its stride wraps the address
// round.
__device__ __forceinline__ BoxAt box_at(const RowMap& map, int batch, int first, int length,
                                        int row, int head) {
  if (!map.ragged) return {0, head, row, batch, false};
  return {0, head, kRaggedEnd - max(length - row, 0), batch * map.rows_per_batch + first + length,
          true};
}

__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, const BoxAt& at,
                                         uint64_t* barrier) {
  if (at.ragged) {
    copy_box_in(shared, map, {at.dim, at.head, at.y, at.x, kRaggedEnd}, barrier);
  } else {
    copy_box_in(shared, map, {at.dim, at.head, at.y, at.x}, barrier);
  }
}

// Loads a box of rows of a SharedTile, chunk by chunk; `shared`: the tile's first such row.
template <class Tile>
__device__ __forceinline__ void load_box(uint8_t* shared, const TensorMap* map, BoxAt at,
                                         uint64_t* full) {
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
    at.dim = c * Tile::kChunk;
    tma_load(shared + c * Tile::kChunkBytes, map, at, full);
  }
}

__device__ __forceinline__ void tma_store(const TensorMap* map, const BoxAt& at,
                                          const void* shared) {
  if (at.ragged) {
    copy_box_out(map, {at.dim, at.head, at.y, at.x, kRaggedEnd}, shared);
  } else {
    copy_box_out(map, {at.dim, at.head, at.y, at.x}, shared);
  }
}

// ---- hidden keys ----
// Keys that no query of the sequence sees, before a window or a chunk, share a tile with
// keys that are seen. Their weight is 0, but 0 · NaN and 0 · ∞ are NaN: the producer clears their
// rows before the consumers may read the tile, so that what they hold reaches nobody. Rows after
// the end of a sequence come as zeros from TMA.

// Zeroes the first rows of a tile that TMA has written, by one thread, and makes that visible to
// the tensor cores of whoever waits for this thread.
template <class Tile>
__device__ __forceinline__ void clear_rows(uint8_t* tile, int rows) {
  const int bytes = min(rows, Tile::kRows) * Tile::kRowBytes;
  // One loop: two make ptxas schedule the consumers of the same kernel worse.
#pragma unroll 1
  for (int at = 0; at < bytes; at += 16)
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
      *reinterpret_cast<uint4*>(tile + chunk * Tile::kChunkBytes + at) = {};
  fence_shared_for_async_proxy();
}

// Clears the first `hidden` rows of a tile whose load completes `loaded`, a barrier for this alone
// in this phase; then the tile counts as full.
template <class Tile>
__device__ __forceinline__ void clear_when_loaded(uint8_t* tile, int hidden, uint64_t* loaded,
                                                  uint32_t phase, uint64_t* full) {
  wait(loaded, phase, "tile_loaded");
  clear_rows<Tile>(tile, hidden);
  arrive(full);
}

}  // namespace flash3::cuda::sm90
