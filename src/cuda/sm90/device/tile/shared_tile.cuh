// SPDX-License-Identifier: Apache-2.0
// A [rows, cols] tile in shared memory, as TMA writes it and wgmma reads it.
//
// The columns are cut into chunks as wide as the swizzle (128 bytes, or 64 where a row is no
// multiple of that); chunk c is a contiguous [rows, chunk] block, its 16-byte pieces permuted
// within groups of eight rows:
//
//   byte(row, col) = (col / kChunk) · rows · swizzle + row · swizzle
//                    + 16 · ((col % kChunk / kPiece) ^ xor(row)) + kElementBytes · (col % kPiece)
#pragma once

#include "cuda/device/ptx/wgmma.cuh"

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

}  // namespace flash3::cuda::sm90
