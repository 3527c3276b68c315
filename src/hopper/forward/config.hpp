// SPDX-License-Identifier: Apache-2.0
// The tile table of the forward kernels, and what follows from a row. constexpr and NVRTC-clean:
// the kernels, the launcher, `explain` and the tests all read this one table, and a row that cannot
// work fails the build.
#pragma once

#include "core/fp8.hpp"
#include "core/host_device.hpp"
#include "hopper/device/element.hpp"
#include "hopper/device/score_kind.hpp"

namespace flash3::hopper {

// How a kernel interleaves its work. The library's kernels take the defaults; `flash3 bench
// --ablation` builds the others, to show what each part is worth.
struct ForwardSchedule {
  bool ping_pong = true;     // warpgroups take turns to issue their products
  bool overlap = true;       // a warpgroup's P·V runs under its next softmax
  bool specialised = true;   // a producer warpgroup loads; otherwise the consumers do
  bool three_stage = false;  // the next Q·Kᵀ runs under a softmax too: two tiles of scores
  bool from_table = true;    // false: with a tile_n that the tile table lacks
  bool lazy_maximum = true;  // FP8: false raises a row's maximum with every score above it
};

// How many blocks of scales an FP8 tile of tile_n keys may lie in, beginning at a multiple of
// tile_n.
FLASH3_HOST_DEVICE constexpr int blocks_of_scales(int tile_n) {
  int step = int(kScaleBlock);  // between the places where tiles begin in a block
  while (tile_n % step != 0) step /= 2;
  return (2 * int(kScaleBlock) - step + tile_n - 1) / int(kScaleBlock);
}

// Columns of the tile of V that FP8 kernels turn: 16-byte pieces are swizzled in groups of four or
// eight.
FLASH3_HOST_DEVICE constexpr int transposed_v_cols(int tile_n) { return (tile_n + 63) / 64 * 64; }

// One kernel: scores are computed in tiles of tile_m queries × tile_n keys by `warpgroups` consumer
// warpgroups of 64 queries each; K and V each travel through a ring of `stages` tiles.
struct ForwardConfig {
  int head_dim;
  int head_dim_v;
  bool band;  // masks by the band; otherwise only the end of the keys
  int tile_n;
  int warpgroups;
  int stages;
  int q_stages;  // 2: Q of the next work tile loads while this one runs
  // Time on one multiprocessor, fitted to measurements: of a key tile, and of what each work tile
  // adds to its key tiles (the first loads and scores, the masks, the last P·V, the store; less the
  // key tiles that warpgroups pass by).
  double key_tile_us;
  double tile_us;
  ScoreKind score = ScoreKind::kPlain;
  ForwardSchedule schedule = {};
  int raw_v_stages = 0;  // FP8: V as it comes, before it is transposed

  FLASH3_HOST_DEVICE constexpr bool fp8() const { return raw_v_stages > 0; }
  FLASH3_HOST_DEVICE constexpr bool holds(Element element) const {
    return fp8() == (element == Element::kE4m3);
  }
  FLASH3_HOST_DEVICE constexpr int element_bytes() const { return fp8() ? 1 : 2; }

  FLASH3_HOST_DEVICE constexpr int tile_m() const { return 64 * warpgroups; }
  FLASH3_HOST_DEVICE constexpr int threads() const {
    return 128 * (warpgroups + (schedule.specialised ? 1 : 0));
  }

  // Registers per thread after setmaxnreg. Together at most what the block was launched with: a
  // warpgroup that asks for more waits for ever.
  FLASH3_HOST_DEVICE constexpr int producer_registers() const {
    return !schedule.specialised ? 0
           : warpgroups == 3     ? 32
           : !fp8()              ? 24
           : warpgroups == 2     ? 40
                                 : 32;
  }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const {
    if (!schedule.specialised) return launch_registers();
    return warpgroups == 2 ? (fp8() ? 232 : 240) : warpgroups == 3 ? 160 : 112;
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
    const int rows = tile_m() / 16 * 40 + tile_m() * 8;  // forward/rows.cuh
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
inline constexpr ForwardConfig kForwardConfigs[] = {
    // D, Dv, band, tile_n, warpgroups, stages, q_stages, key_tile_us, tile_us
    {64, 64, false, 128, 3, 2, 2, 1.44, 1.5},    // 576, 1.28 at 16k
    {64, 64, false, 64, 4, 2, 2, 1.06, 1.4},     // 444, 1.21 at 512
    {64, 64, true, 128, 3, 2, 2, 1.44, 2.4},     // 548, 1.28 at 16k
    {64, 64, true, 64, 4, 2, 2, 1.06, 1.3},      // 381, 1.19 at 1k
    {96, 96, false, 128, 2, 2, 2, 1.37, 1.6},    // 606, 1.23 at 16k
    {96, 96, true, 128, 2, 2, 2, 1.41, 1.7},     // 590, 1.34 at 16k
    {128, 128, false, 128, 2, 2, 2, 1.65, 1.5},  // 533, 1.07 at 512
    {128, 128, false, 144, 2, 2, 2, 1.83, 1.7},  // 706, 1.14 at 16k
    {128, 128, true, 128, 2, 2, 2, 1.65, 2.3},   // 576, 1.29 at 2k
    {128, 128, true, 144, 2, 2, 2, 1.79, 3.0},   // 713, 1.31 at 16k
    {192, 128, false, 128, 2, 2, 1, 1.93, 3.1},  // 718 at 16k
    {192, 128, true, 128, 2, 2, 1, 1.98, 4.2},   // 699 at 16k
    {192, 192, false, 112, 2, 2, 1, 1.78, 3.7},  // 816, 1.22 at 16k
    {192, 192, true, 96, 2, 2, 1, 1.53, 5.1},    // 814, 1.34 at 16k
    {256, 256, false, 64, 2, 2, 1, 1.51, 4.0},   // 768, 1.20 at 16k
    {256, 256, true, 64, 2, 2, 1, 1.51, 4.5},    // 780, 1.36 at 16k
    // Softcaps, under any mask. Not measured: times are the plain rows', 10 % longer a key tile.
    {64, 64, true, 128, 3, 2, 2, 1.58, 2.4, ScoreKind::kSoftcap},
    {64, 64, true, 64, 4, 2, 2, 1.17, 1.3, ScoreKind::kSoftcap},
    {128, 128, true, 128, 2, 2, 2, 1.82, 2.3, ScoreKind::kSoftcap},
    {128, 128, true, 144, 2, 2, 2, 1.97, 3.0, ScoreKind::kSoftcap},
    {256, 256, true, 64, 2, 2, 1, 1.66, 4.5, ScoreKind::kSoftcap},
    // FP8. Wide tiles for long sequences, as in 16 bits. Fitted to e4m3 (2026-11-22), but for d 192
    // and softcaps.
    {64, 64, false, 128, 3, 2, 2, 1.28, 2.9, ScoreKind::kPlain, {}, 2},
    {64, 64, false, 64, 4, 3, 2, 0.92, 2.6, ScoreKind::kPlain, {}, 3},
    {64, 64, true, 128, 3, 2, 2, 1.28, 5.2, ScoreKind::kPlain, {}, 2},
    {64, 64, true, 64, 4, 3, 2, 0.92, 4.3, ScoreKind::kPlain, {}, 3},
    {128, 128, false, 128, 2, 2, 2, 1.30, 2.6, ScoreKind::kPlain, {}, 2},
    {128, 128, false, 96, 3, 2, 2, 1.43, 3.8, ScoreKind::kPlain, {}, 2},
    {128, 128, true, 128, 2, 2, 2, 1.33, 3.6, ScoreKind::kPlain, {}, 2},
    {128, 128, true, 96, 3, 2, 2, 1.40, 4.3, ScoreKind::kPlain, {}, 2},
    {192, 128, false, 128, 2, 2, 2, 1.2, 2.0, ScoreKind::kPlain, {}, 2},
    {192, 128, true, 128, 2, 2, 2, 1.2, 3.0, ScoreKind::kPlain, {}, 2},
    {192, 192, false, 128, 2, 2, 1, 1.4, 2.0, ScoreKind::kPlain, {}, 2},
    {192, 192, true, 128, 2, 2, 1, 1.4, 3.0, ScoreKind::kPlain, {}, 2},
    {256, 256, false, 64, 2, 3, 1, 1.18, 4.2, ScoreKind::kPlain, {}, 3},
    {256, 256, false, 96, 2, 2, 1, 1.57, 5.1, ScoreKind::kPlain, {}, 2},
    {256, 256, true, 64, 2, 3, 1, 1.18, 5.2, ScoreKind::kPlain, {}, 3},
    {256, 256, true, 96, 2, 2, 1, 1.57, 5.6, ScoreKind::kPlain, {}, 2},
    {64, 64, true, 128, 3, 2, 2, 2.0, 2.4, ScoreKind::kSoftcap, {}, 2},
    {128, 128, true, 128, 2, 2, 2, 1.6, 2.3, ScoreKind::kSoftcap, {}, 2},
    {192, 128, true, 128, 2, 2, 2, 1.8, 3.0, ScoreKind::kSoftcap, {}, 2},
    {192, 192, true, 128, 2, 2, 1, 1.9, 3.0, ScoreKind::kSoftcap, {}, 2},
    {256, 256, true, 64, 2, 3, 1, 1.3, 4.0, ScoreKind::kSoftcap, {}, 3},
};

constexpr bool is_valid(const ForwardConfig& c) {
  const int score_registers = c.tile_n / 2 * (c.schedule.three_stage ? 2 : 1),
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
constexpr ForwardConfig forward_config(int head_dim, int head_dim_v, bool band, int tile_n,
                                       const ForwardSchedule& schedule = {},
                                       ScoreKind score = ScoreKind::kPlain,
                                       Element element = Element::kBFloat16) {
  for (ForwardConfig c : kForwardConfigs) {
    if (c.head_dim == head_dim && c.head_dim_v == head_dim_v && c.band == band &&
        c.score == score && c.holds(element) && (c.tile_n == tile_n || !schedule.from_table)) {
      c.tile_n = tile_n;
      c.schedule = schedule;
      return c;
    }
  }
  return {};
}

}  // namespace flash3::hopper
