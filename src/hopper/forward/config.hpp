// SPDX-License-Identifier: Apache-2.0
// The tile table of the forward kernels, and what follows from a row. constexpr and NVRTC-clean:
// the kernels, the launcher, `explain` and the tests all read this one table, and a row that cannot
// work fails the build.
#pragma once

#include "core/scales.hpp"
#include "hopper/device/kinds.hpp"

namespace flash3::hopper {

// How many blocks of scales an FP8 tile of tile_n keys may lie in, beginning at a multiple of
// tile_n.
FLASH3_HOST_DEVICE constexpr int blocks_of_scales(int tile_n) {
  int step = int(kScaleBlock);  // between the places where tiles begin in a block
  while (tile_n % step != 0) step /= 2;
  return (2 * int(kScaleBlock) - step + tile_n - 1) / int(kScaleBlock);
}

// Columns of FP8's transposed tile of V: 16-byte pieces are swizzled in groups of four or eight.
FLASH3_HOST_DEVICE constexpr int transposed_v_cols(int tile_n) { return (tile_n + 63) / 64 * 64; }

// What Q, K and V are: float16 or bfloat16, or FP8.
enum class Operands { k16Bit, kE4m3 };

// Registers a thread after setmaxnreg. Together at most what the block was launched with: a
// warpgroup that asks for more waits for ever.
struct RegisterSplit {
  int producer, consumer;
};

FLASH3_HOST_DEVICE constexpr RegisterSplit register_split(Operands operands, int warpgroups) {
  if (warpgroups == 3) return {32, 160};
  // FP8's producer transposes V as well.
  if (operands == Operands::kE4m3)
    return warpgroups == 2 ? RegisterSplit{40, 232} : RegisterSplit{32, 112};
  return warpgroups == 2 ? RegisterSplit{24, 240} : RegisterSplit{24, 112};
}

// One kernel: scores are computed in tiles of tile_m queries × tile_n keys by `warpgroups` consumer
// warpgroups of 64 queries each; K and V each travel through a ring of `stages` tiles.
struct ForwardConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  bool band = false;  // masks by the band; otherwise only the end of the keys
  ScoreKind score = ScoreKind::kPlain;
  Operands operands = Operands::k16Bit;
  int tile_n = 0;
  int warpgroups = 0;
  int stages = 0;
  int q_stages = 0;      // 2: Q of the next work tile loads while this one runs
  int raw_v_stages = 0;  // FP8: V as it comes, before it is transposed
  // Time on one multiprocessor, fitted to measurements: of a key tile, and of what each work tile
  // adds to its key tiles (the first loads and scores, the masks, the last P·V, the store; less the
  // key tiles that warpgroups skip).
  double key_tile_us = 0;
  double tile_us = 0;

  FLASH3_HOST_DEVICE constexpr bool fp8() const { return operands == Operands::kE4m3; }
  FLASH3_HOST_DEVICE constexpr bool holds(Element element) const {
    return fp8() == (element == Element::kE4m3);
  }
  FLASH3_HOST_DEVICE constexpr int element_bytes() const { return fp8() ? 1 : 2; }

  FLASH3_HOST_DEVICE constexpr int tile_m() const { return 64 * warpgroups; }
  FLASH3_HOST_DEVICE constexpr int threads() const { return 128 * (warpgroups + 1); }
  FLASH3_HOST_DEVICE constexpr int producer_registers() const {
    return register_split(operands, warpgroups).producer;
  }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const {
    return register_split(operands, warpgroups).consumer;
  }
  // What the block starts with: the launch bound's share, which ptxas reports.
  FLASH3_HOST_DEVICE constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }

  // Shared memory in bytes. 16 bits: the output is staged in Q's place, each warpgroup's own rows,
  // once its last Q·Kᵀ is done.
  FLASH3_HOST_DEVICE constexpr int q_bytes() const { return tile_m() * head_dim * element_bytes(); }
  FLASH3_HOST_DEVICE constexpr int k_bytes() const { return tile_n * head_dim * element_bytes(); }
  FLASH3_HOST_DEVICE constexpr int v_bytes() const { return tile_n * head_dim_v * element_bytes(); }
  FLASH3_HOST_DEVICE constexpr int transposed_v_bytes() const {
    return transposed_v_cols(tile_n) * head_dim_v;
  }
  FLASH3_HOST_DEVICE constexpr int control_bytes() const {
    const int barriers = 2 * warpgroups * q_stages + 4 * stages + 2 * raw_v_stages + 1;
    const int tile_ring = 2408;                          // device/scheduler.cuh
    const int rows = tile_m() / 16 * 40 + tile_m() * 8;  // forward/warp_rows.cuh
    const int scales = fp8() ? 2 * stages * blocks_of_scales(tile_n) * 8 + q_stages * 16 : 0;
    return 8 * barriers + tile_ring + rows + scales;
  }
  FLASH3_HOST_DEVICE constexpr int shared_bytes() const {
    return q_stages * q_bytes() +
           stages * (k_bytes() + (fp8() ? transposed_v_bytes() : v_bytes())) +
           raw_v_stages * v_bytes() + control_bytes();
  }
};

inline constexpr int kMaxSharedBytes = 227 * 1024;

// Head dims and mask choose a group of rows, the narrowest that is wide enough; within it
// forward/estimate.cpp takes the row that is expected to be the fastest. key_tile_us and tile_us
// are fitted to bf16, 16k tokens, hidden size 2048, band: causal, H200, 2026-11-21. Behind a row:
// TFLOP/s and the ratio to cuDNN in the same run, if there was one, and at which length.
// clang-format off
inline constexpr ForwardConfig kForwardConfigs[] = {
    {.head_dim = 64, .head_dim_v = 64, .band = false,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.44, .tile_us = 1.5},  // 576, 1.28 at 16k
    {.head_dim = 64, .head_dim_v = 64, .band = false,
     .tile_n = 64, .warpgroups = 4, .stages = 2, .q_stages = 2, .key_tile_us = 1.06, .tile_us = 1.4},  // 444, 1.21 at 512
    {.head_dim = 64, .head_dim_v = 64, .band = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.44, .tile_us = 2.4},  // 548, 1.28 at 16k
    {.head_dim = 64, .head_dim_v = 64, .band = true,
     .tile_n = 64, .warpgroups = 4, .stages = 2, .q_stages = 2, .key_tile_us = 1.06, .tile_us = 1.3},  // 381, 1.19 at 1k
    {.head_dim = 96, .head_dim_v = 96, .band = false,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.37, .tile_us = 1.6},  // 606, 1.23 at 16k
    {.head_dim = 96, .head_dim_v = 96, .band = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.41, .tile_us = 1.7},  // 590, 1.34 at 16k
    {.head_dim = 128, .head_dim_v = 128, .band = false,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 1.5},  // 533, 1.07 at 512
    {.head_dim = 128, .head_dim_v = 128, .band = false,
     .tile_n = 144, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.83, .tile_us = 1.7},  // 706, 1.14 at 16k
    {.head_dim = 128, .head_dim_v = 128, .band = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 2.3},  // 576, 1.29 at 2k
    {.head_dim = 128, .head_dim_v = 128, .band = true,
     .tile_n = 144, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.79, .tile_us = 3.0},  // 713, 1.31 at 16k
    {.head_dim = 160, .head_dim_v = 160, .band = false,
     .tile_n = 112, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.60, .tile_us = 3.1},  // 674 at 16k
    {.head_dim = 160, .head_dim_v = 160, .band = true,
     .tile_n = 112, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.60, .tile_us = 4.4},  // 653 at 16k
    {.head_dim = 192, .head_dim_v = 128, .band = false,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.93, .tile_us = 3.1},  // 718 at 16k
    {.head_dim = 192, .head_dim_v = 128, .band = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.98, .tile_us = 4.2},  // 699 at 16k
    {.head_dim = 192, .head_dim_v = 192, .band = false,
     .tile_n = 112, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.78, .tile_us = 3.7},  // 816, 1.22 at 16k
    {.head_dim = 192, .head_dim_v = 192, .band = true,
     .tile_n = 96, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.53, .tile_us = 5.1},  // 814, 1.34 at 16k
    {.head_dim = 256, .head_dim_v = 256, .band = false,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.51, .tile_us = 4.0},  // 768, 1.20 at 16k
    {.head_dim = 256, .head_dim_v = 256, .band = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.51, .tile_us = 4.5},  // 780, 1.36 at 16k
    // Softcaps, under any mask. Not measured: times are the plain rows', 10 % longer a key tile.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.58, .tile_us = 2.4},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap,
     .tile_n = 64, .warpgroups = 4, .stages = 2, .q_stages = 2, .key_tile_us = 1.17, .tile_us = 1.3},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap,
     .tile_n = 144, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.97, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    // FP8. Wide tiles for long sequences, as in 16 bits. Fitted to e4m3 (2026-11-22), but for d 192
    // and softcaps.
    {.head_dim = 64, .head_dim_v = 64, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.28, .tile_us = 2.9},
    {.head_dim = 64, .head_dim_v = 64, .band = false, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 4, .stages = 3, .q_stages = 2, .raw_v_stages = 3, .key_tile_us = 0.92, .tile_us = 2.6},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.28, .tile_us = 5.2},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 4, .stages = 3, .q_stages = 2, .raw_v_stages = 3, .key_tile_us = 0.92, .tile_us = 4.3},
    {.head_dim = 128, .head_dim_v = 128, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.30, .tile_us = 2.6},
    {.head_dim = 128, .head_dim_v = 128, .band = false, .operands = Operands::kE4m3,
     .tile_n = 96, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.43, .tile_us = 3.8},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.33, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3,
     .tile_n = 96, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.40, .tile_us = 4.3},
    {.head_dim = 192, .head_dim_v = 128, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.2, .tile_us = 2.0},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.2, .tile_us = 3.0},
    {.head_dim = 192, .head_dim_v = 192, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .key_tile_us = 1.4, .tile_us = 2.0},
    {.head_dim = 192, .head_dim_v = 192, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .key_tile_us = 1.4, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .band = false, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .key_tile_us = 1.18, .tile_us = 4.2},
    {.head_dim = 256, .head_dim_v = 256, .band = false, .operands = Operands::kE4m3,
     .tile_n = 96, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .key_tile_us = 1.57, .tile_us = 5.1},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .key_tile_us = 1.18, .tile_us = 5.2},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kE4m3,
     .tile_n = 96, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .key_tile_us = 1.57, .tile_us = 5.6},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 2.0, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.6, .tile_us = 2.3},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.8, .tile_us = 3.0},
    {.head_dim = 192, .head_dim_v = 192, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .key_tile_us = 1.9, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .key_tile_us = 1.3, .tile_us = 4.0},
};
// clang-format on

constexpr bool is_valid(const ForwardConfig& c) {
  const int score_registers = c.tile_n / 2,
            probability_registers = c.tile_n / 8 * c.element_bytes(),
            output_registers = c.head_dim_v / 2;
  return c.shared_bytes() <= kMaxSharedBytes && c.tile_n % 16 == 0 && c.tile_n <= 256 &&
         c.head_dim_v <= c.head_dim && c.warpgroups >= 2 && c.warpgroups <= 4 &&
         128 * (c.producer_registers() + c.warpgroups * c.consumer_registers()) <=
             c.threads() * c.launch_registers() &&
         score_registers + probability_registers + output_registers + 16 <= c.consumer_registers();
}

constexpr bool all_valid() {
  for (const ForwardConfig& c : kForwardConfigs) {
    if (!is_valid(c)) return false;
  }
  return true;
}
static_assert(all_valid(), "a row of the tile table exceeds shared memory or registers");

// The row of a kernel instance; no head dims if there is none.
constexpr ForwardConfig forward_config(Element element, int head_dim, int head_dim_v, bool band,
                                       ScoreKind score, int tile_m, int tile_n) {
  for (const ForwardConfig& c : kForwardConfigs) {
    if (c.holds(element) && c.head_dim == head_dim && c.head_dim_v == head_dim_v &&
        c.band == band && c.score == score && c.tile_m() == tile_m && c.tile_n == tile_n)
      return c;
  }
  return {};
}

}  // namespace flash3::hopper
