// SPDX-License-Identifier: Apache-2.0
// The tile table of the decode kernels, and what follows from a row. Kernels, launcher, `explain`
// and tests all read this one table; a row that cannot work fails the build. constexpr and
// NVRTC-clean.
#pragma once

#include "core/arithmetic.hpp"
#include "hopper/device/kinds.hpp"

namespace flash3::hopper {

// One kernel: `rows` query rows (queries × query heads of one KV head) against key tiles of tile_n
// keys; K and V each travel through a ring of `stages` tiles.
struct DecodeConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int rows = 0;
  int tile_n = 0;
  int stages = 0;

  FLASH3_HOST_DEVICE constexpr int threads() const { return 256; }  // producers, consumers
  FLASH3_HOST_DEVICE constexpr int tile_bytes() const {             // of K and V
    return tile_n * (head_dim + head_dim_v) * 2;
  }
  FLASH3_HOST_DEVICE constexpr int shared_bytes() const {
    const int tiles = stages * tile_bytes();
    const int operands = rows * head_dim * 2 + 2 * rows * tile_n * 2;  // Q, and P twice
    const int reductions = 4 * rows * 4 + rows * 8;
    return tiles + operands + reductions + 4 * stages * 8 + kWorkBytes;
  }

  // A block leaves a part of an item that it shares. A part has so many units of 16 bytes
  // (share.cuh).
  FLASH3_HOST_DEVICE constexpr int units_of_row() const { return head_dim_v / 2 + 4; }
  FLASH3_HOST_DEVICE constexpr int part_units() const { return rows * units_of_row(); }

  static constexpr int kWorkBytes = 3072;  // work.cuh
};

// A split is whole key tiles, so the bits of a result depend on tile_n. They do not depend on rows
// and stages.
// clang-format off
inline constexpr DecodeConfig kDecodeConfigs[] = {
    {.head_dim = 64, .head_dim_v = 64, .rows = 8, .tile_n = 128, .stages = 6},
    {.head_dim = 64, .head_dim_v = 64, .rows = 16, .tile_n = 128, .stages = 6},
    {.head_dim = 64, .head_dim_v = 64, .rows = 32, .tile_n = 128, .stages = 5},
    {.head_dim = 128, .head_dim_v = 128, .rows = 8, .tile_n = 128, .stages = 3},
    {.head_dim = 128, .head_dim_v = 128, .rows = 16, .tile_n = 128, .stages = 3},
    {.head_dim = 192, .head_dim_v = 128, .rows = 8, .tile_n = 64, .stages = 5},
    {.head_dim = 192, .head_dim_v = 128, .rows = 16, .tile_n = 64, .stages = 5},
    {.head_dim = 256, .head_dim_v = 256, .rows = 8, .tile_n = 64, .stages = 3},
    {.head_dim = 256, .head_dim_v = 256, .rows = 16, .tile_n = 64, .stages = 3},
};
// clang-format on

// An item has at most so many splits; so many neighbours make a fold (work.hpp).
inline constexpr int kMostDecodeSplits = 128, kSplitsPerFold = 8;
inline constexpr int kMostDecodeFolds = kMostDecodeSplits / kSplitsPerFold;
inline constexpr int kMaxDecodeBlocks = 192;  // of a launch

FLASH3_HOST_DEVICE constexpr DecodeConfig decode_config(int head_dim, int head_dim_v, int rows) {
  for (const DecodeConfig& c : kDecodeConfigs)
    if (c.head_dim == head_dim && c.head_dim_v == head_dim_v && c.rows == rows) return c;
  return {};
}

}  // namespace flash3::hopper
