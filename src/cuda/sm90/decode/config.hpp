// SPDX-License-Identifier: Apache-2.0
// The tile table of the decode kernels, and what follows from a row. Kernels, launcher, `explain`
// and tests all read this one table; a row that cannot work fails the build. constexpr and
// NVRTC-clean.
#pragma once

#include "core/arithmetic.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

// One kernel: `rows` query rows (queries × query heads of one KV head) against key tiles of tile_n
// keys; K and V each travel through a ring of `stages` tiles. `consumers` warpgroups have an equal
// part of the rows each; with `parks` what they have merged waits in shared memory, not in
// registers. With e4m3 K and V are e4m3, and the queries of any type that they may
// have; otherwise all are 16-bit. `blocks` share a multiprocessor: to bring e4m3 to float16 takes
// the warps of two.
struct DecodeConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  ScoreKind score = ScoreKind::kPlain;  // e4m3, latent: a softcap or not, as the call has it
  int rows = 0;
  int tile_n = 0;
  int stages = 0;
  int consumers = 1;
  bool parks = false;
  bool e4m3 = false;
  int blocks = 1;
  bool latent = false;  // K is the rope parts of the keys, V their latent parts (latent/traits.cuh)

  constexpr bool operator==(const DecodeConfig&) const = default;

  FLASH3_HOST_DEVICE constexpr bool holds(Element element) const {
    return e4m3 == (element == Element::kE4m3);
  }
  FLASH3_HOST_DEVICE constexpr DecodeConfig compiled() const { return *this; }

  // Of one warpgroup of producers, and of the consumers.
  FLASH3_HOST_DEVICE constexpr int threads() const { return 128 * (1 + consumers); }
  // A thread's, as the kernel begins. Where that is not enough consumers have some of the
  // producers', for good.
  FLASH3_HOST_DEVICE constexpr int registers() const {
    const int share = 65536 / (threads() * blocks) / 8 * 8;
    return share < 255 ? share : 255;
  }
  FLASH3_HOST_DEVICE constexpr bool borrows() const { return blocks * consumers > 1; }
  FLASH3_HOST_DEVICE constexpr int producer_registers() const {
    return head_dim == 192 ? 80 : consumers == 2 ? 72 : 64;
  }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const {
    return registers() + (registers() - producer_registers()) / consumers;
  }
  FLASH3_HOST_DEVICE constexpr int element_bytes() const { return e4m3 ? 1 : 2; }  // of K and V
  FLASH3_HOST_DEVICE constexpr int tile_bytes() const {                            // of both
    return tile_n * (head_dim + head_dim_v) * element_bytes();
  }
  FLASH3_HOST_DEVICE constexpr int shared_bytes() const {
    const int tiles = stages * tile_bytes();
    // Q; maxima, sums, largest scores, row keys; no P, which takes the place of rope parts
    if (latent)
      return tiles + rows * (head_dim + head_dim_v) * 2 + rows * ((stages + 4) * 4 + 8) +
             7 * stages * 8 + kLatentWorkBytes;
    const int operands = rows * head_dim * 2 + 2 * rows * tile_n * 2;  // Q, and P twice
    const int reductions = 4 * rows * 4 + rows * 8;
    const int fp8 = e4m3 ? rows * 4 + stages * (tile_n * 8 + 8) : 0;
    const int parked = parks ? rows * head_dim_v * 4 + 4 * rows * 8 : 0;
    return tiles + operands + reductions + 4 * stages * 8 + kWorkBytes + fp8 + parked;
  }

  // A block leaves a partial of an item that it shares. A partial has so many units of 16 bytes
  // (partials.cuh).
  FLASH3_HOST_DEVICE constexpr int units_of_row() const { return head_dim_v / 2 + 4; }
  FLASH3_HOST_DEVICE constexpr int partial_units() const { return rows * units_of_row(); }

  static constexpr int kWorkBytes = 3072;  // work.cuh
  static constexpr int kLatentWorkBytes = 1024;
};

// A split is whole key tiles, so the bits of a result depend on tile_n. They do not depend on rows,
// stages and consumers.
// clang-format off
inline constexpr DecodeConfig kDecodeConfigs[] = {
    {.head_dim = 64, .head_dim_v = 64, .rows = 8, .tile_n = 128, .stages = 6},
    {.head_dim = 64, .head_dim_v = 64, .rows = 16, .tile_n = 128, .stages = 6},
    {.head_dim = 64, .head_dim_v = 64, .rows = 32, .tile_n = 128, .stages = 5},
    {.head_dim = 64, .head_dim_v = 64, .rows = 64, .tile_n = 128, .stages = 5, .consumers = 2},
    {.head_dim = 128, .head_dim_v = 128, .rows = 8, .tile_n = 128, .stages = 3},
    {.head_dim = 128, .head_dim_v = 128, .rows = 16, .tile_n = 128, .stages = 3},
    {.head_dim = 128, .head_dim_v = 128, .rows = 32, .tile_n = 128, .stages = 3},
    {.head_dim = 128, .head_dim_v = 128, .rows = 64, .tile_n = 128, .stages = 2, .consumers = 2, .parks = true},
    {.head_dim = 192, .head_dim_v = 128, .rows = 8, .tile_n = 64, .stages = 5},
    {.head_dim = 192, .head_dim_v = 128, .rows = 16, .tile_n = 64, .stages = 5},
    {.head_dim = 192, .head_dim_v = 128, .rows = 32, .tile_n = 64, .stages = 5},
    {.head_dim = 256, .head_dim_v = 256, .rows = 8, .tile_n = 64, .stages = 3},
    {.head_dim = 256, .head_dim_v = 256, .rows = 16, .tile_n = 64, .stages = 3},
    {.head_dim = 256, .head_dim_v = 256, .rows = 32, .tile_n = 64, .stages = 3, .consumers = 2},
    // The same rows under a softcap.
    {.head_dim = 64, .head_dim_v = 64, .score = ScoreKind::kSoftcap, .rows = 8, .tile_n = 128, .stages = 6},
    {.head_dim = 64, .head_dim_v = 64, .score = ScoreKind::kSoftcap, .rows = 16, .tile_n = 128, .stages = 6},
    {.head_dim = 64, .head_dim_v = 64, .score = ScoreKind::kSoftcap, .rows = 32, .tile_n = 128, .stages = 5},
    {.head_dim = 64, .head_dim_v = 64, .score = ScoreKind::kSoftcap, .rows = 64, .tile_n = 128, .stages = 5, .consumers = 2},
    {.head_dim = 128, .head_dim_v = 128, .score = ScoreKind::kSoftcap, .rows = 8, .tile_n = 128, .stages = 3},
    {.head_dim = 128, .head_dim_v = 128, .score = ScoreKind::kSoftcap, .rows = 16, .tile_n = 128, .stages = 3},
    {.head_dim = 128, .head_dim_v = 128, .score = ScoreKind::kSoftcap, .rows = 32, .tile_n = 128, .stages = 3},
    {.head_dim = 128, .head_dim_v = 128, .score = ScoreKind::kSoftcap, .rows = 64, .tile_n = 128, .stages = 2, .consumers = 2, .parks = true},
    {.head_dim = 192, .head_dim_v = 128, .score = ScoreKind::kSoftcap, .rows = 8, .tile_n = 64, .stages = 5},
    {.head_dim = 192, .head_dim_v = 128, .score = ScoreKind::kSoftcap, .rows = 16, .tile_n = 64, .stages = 5},
    {.head_dim = 192, .head_dim_v = 128, .score = ScoreKind::kSoftcap, .rows = 32, .tile_n = 64, .stages = 5},
    {.head_dim = 256, .head_dim_v = 256, .score = ScoreKind::kSoftcap, .rows = 8, .tile_n = 64, .stages = 3},
    {.head_dim = 256, .head_dim_v = 256, .score = ScoreKind::kSoftcap, .rows = 16, .tile_n = 64, .stages = 3},
    {.head_dim = 256, .head_dim_v = 256, .score = ScoreKind::kSoftcap, .rows = 32, .tile_n = 64, .stages = 3, .consumers = 2},
    // Keys and values in e4m3.
    {.head_dim = 64, .head_dim_v = 64, .rows = 8, .tile_n = 128, .stages = 6, .e4m3 = true, .blocks = 2},
    {.head_dim = 64, .head_dim_v = 64, .rows = 16, .tile_n = 128, .stages = 5, .e4m3 = true, .blocks = 2},
    {.head_dim = 128, .head_dim_v = 128, .rows = 8, .tile_n = 128, .stages = 3, .e4m3 = true, .blocks = 2},
    {.head_dim = 128, .head_dim_v = 128, .rows = 16, .tile_n = 64, .stages = 6, .e4m3 = true, .blocks = 2},
    {.head_dim = 128, .head_dim_v = 128, .rows = 32, .tile_n = 64, .stages = 4, .parks = true, .e4m3 = true, .blocks = 2},
    {.head_dim = 192, .head_dim_v = 128, .rows = 8, .tile_n = 64, .stages = 5, .e4m3 = true, .blocks = 2},
    {.head_dim = 192, .head_dim_v = 128, .rows = 16, .tile_n = 64, .stages = 4, .e4m3 = true, .blocks = 2},
    {.head_dim = 256, .head_dim_v = 256, .rows = 8, .tile_n = 64, .stages = 3, .e4m3 = true, .blocks = 2},
    // Keys with a latent and a rope part.
    {.head_dim = 64, .head_dim_v = 512, .rows = 64, .tile_n = 64, .stages = 2, .consumers = 2, .latent = true},
};
// clang-format on

constexpr bool has_row(const DecodeConfig& row) {
  for (const DecodeConfig& c : kDecodeConfigs)
    if (c == row) return true;
  return false;
}
constexpr bool all_capped() {
  for (DecodeConfig c : kDecodeConfigs) {
    if (c.e4m3 || c.latent) continue;
    c.score = c.score == ScoreKind::kPlain ? ScoreKind::kSoftcap : ScoreKind::kPlain;
    if (!has_row(c)) return false;
  }
  return true;
}
static_assert(all_capped(), "16-bit rows come in pairs, with and without a softcap");

// An item has at most so many splits; so many neighbours make a fold (work.hpp).
inline constexpr int kMostDecodeSplits = 128, kSplitsPerFold = 8;
inline constexpr int kMostDecodeFolds = kMostDecodeSplits / kSplitsPerFold;
inline constexpr int kMaxDecodeBlocks = 384;  // of a launch

constexpr DecodeConfig latent_config() {
  for (const DecodeConfig& c : kDecodeConfigs)
    if (c.latent) return c;
  return {};
}
inline constexpr DecodeConfig kLatentConfig = latent_config();

}  // namespace flash3::cuda::sm90
