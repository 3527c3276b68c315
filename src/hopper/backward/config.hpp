// SPDX-License-Identifier: Apache-2.0
// The tile table of the backward kernels, and what follows from a row. constexpr and NVRTC-clean,
// like the forward's.
#pragma once

#include "hopper/backward/key_schedule.hpp"
#include "hopper/device/score_kind.hpp"

namespace flash3::hopper {

inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kQueryStages = 2;  // of Q with its LSE, and of dOut with delta
inline constexpr int kDsStages = 2;

// One kernel: a block owns tile_n keys, whose dK and dV stay in registers, and walks over query
// tiles of tile_m.
struct BackwardConfig {
  int head_dim;
  int head_dim_v;
  bool band;         // masks by the band; otherwise only the end of the keys
  int from_queries;  // for calls of at least so many
  int tile_m;
  // The consumer warpgroups share 64 keys, dV in the registers of one and dK in those of the other;
  // otherwise each has 64 keys of its own. README.md draws both.
  bool wide;
  ScoreKind score = ScoreKind::kPlain;

  FLASH3_HOST_DEVICE constexpr int tile_n() const { return wide ? 64 : 128; }
  FLASH3_HOST_DEVICE constexpr int threads() const { return 128 * (kConsumerWarpgroups + 1); }

  // Registers per thread after setmaxnreg; see forward/config.hpp. A wide kernel's producer
  // computes dQ.
  FLASH3_HOST_DEVICE constexpr int producer_registers() const { return wide ? 72 : 24; }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const { return wide ? 216 : 240; }
  FLASH3_HOST_DEVICE constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }

  // dQ of a query tile is computed, and lies in the workspace, in blocks of 64 columns: of 64
  // queries, or, transposed, of all, since the M of a tensor core product is 64.
  FLASH3_HOST_DEVICE constexpr bool dq_transposed() const { return tile_m % 64 != 0; }
  FLASH3_HOST_DEVICE constexpr int dq_queries() const { return dq_transposed() ? tile_m : 64; }

  // Float32 on its way between registers: dQ to the warp that adds it, or P of a wide tile from one
  // warpgroup to the other. In float4 of each thread of a warpgroup.
  FLASH3_HOST_DEVICE constexpr int fragment_quads() const {
    return wide ? 8 : tile_m * head_dim / 512;
  }

  // Rows of the mask that lie in shared memory; without a band none is read.
  FLASH3_HOST_DEVICE constexpr int mask_rows() const { return band ? tile_n() : 1; }

  // Shared memory in bytes. dK and dV are staged in the places of K and V.
  FLASH3_HOST_DEVICE constexpr int q_bytes() const { return tile_m * (head_dim * 2 + 4); }
  FLASH3_HOST_DEVICE constexpr int dout_bytes() const { return tile_m * (head_dim_v * 2 + 4); }
  FLASH3_HOST_DEVICE constexpr int ds_bytes() const { return kDsStages * tile_m * tile_n() * 2; }
  FLASH3_HOST_DEVICE constexpr int shared_bytes() const {
    const int barriers = 5 + 2 * (kConsumerWarpgroups + 1 + kDsStages + 2 * kQueryStages);
    return tile_n() * (head_dim + head_dim_v) * 2 + kQueryStages * (q_bytes() + dout_bytes()) +
           ds_bytes() + fragment_quads() * 2048 +
           (8 * barriers + int(sizeof(KeyTile)) + mask_rows() * 8 + 15) / 16 * 16;
  }
};

// A call takes the first row that holds its head dims and whose from_queries it reaches. Behind a
// row: TFLOP/s and the ratio to cuDNN in the same run, bf16, 16k tokens of one sequence, hidden
// size 2048, H200.
inline constexpr BackwardConfig kBackwardConfigs[] = {
    // D, Dv, band, from_queries, tile_m, wide
    {64, 64, false, 0, 128, false},     // 544, 1.23
    {64, 64, true, 0, 128, false},      // 522, 1.24
    {128, 128, false, 0, 80, false},    // 674, 1.23
    {128, 128, true, 8192, 80, false},  // 629, 1.18
    {128, 128, true, 0, 64, false},     // 532, 1.19 at 4k
    {192, 128, false, 0, 64, true},     // not measured beside a peer
    {192, 128, true, 0, 64, true},      // not measured beside a peer
    {192, 192, false, 0, 64, true},     // not measured beside a peer
    {192, 192, true, 0, 64, true},      // not measured beside a peer
    {256, 256, false, 0, 64, true},     // 432, 1.21
    {256, 256, true, 0, 64, true},      // 438, 1.12
    // Softcaps, under any mask. Causal, cap 50: 0.80, 0.84 (from 8k) and 0.99 of the plain kernels.
    {64, 64, true, 0, 96, false, ScoreKind::kSoftcap},
    {128, 128, true, 8192, 80, false, ScoreKind::kSoftcap},
    {128, 128, true, 0, 64, false, ScoreKind::kSoftcap},
    {256, 256, true, 0, 64, true, ScoreKind::kSoftcap},
};

constexpr bool is_valid(const BackwardConfig& c) {
  const int gradients = (c.wide ? c.head_dim : c.head_dim + c.head_dim_v) / 2,
            scores = c.tile_m / 2;
  // The half of dQ that a consumer warpgroup computes is a block of 64 × 64, or transposed.
  const bool halves = (c.head_dim == 64 || c.head_dim == 128) &&
                      (c.dq_transposed() || c.tile_m * c.head_dim == kConsumerWarpgroups * 64 * 64);
  // Of other heights preprocess.cu and convert_dq.cu know nothing.
  const bool known_height = c.tile_m % 64 == 0 || c.tile_m == 80 || c.tile_m == 96;
  return c.shared_bytes() <= 227 * 1024 && c.head_dim % 64 == 0 && c.head_dim_v % 64 == 0 &&
         c.head_dim_v <= c.head_dim && known_height && (c.wide ? c.tile_m == 64 : halves) &&
         128 * (c.producer_registers() + kConsumerWarpgroups * c.consumer_registers()) <=
             c.threads() * c.launch_registers() &&
         gradients + 2 * scores + 16 <= c.consumer_registers();
}

constexpr bool all_backward_valid() {
  for (const BackwardConfig& c : kBackwardConfigs) {
    if (!is_valid(c)) return false;
  }
  return true;
}
static_assert(all_backward_valid(), "a row of the tile table exceeds shared memory or registers");

// Of the rows with this height.
constexpr int widest_head_dim_v(int tile_m) {
  int widest = 0;
  for (const BackwardConfig& c : kBackwardConfigs)
    if (c.tile_m == tile_m && c.head_dim_v > widest) widest = c.head_dim_v;
  return widest;
}

// The row of a kernel instance; no head dims if there is none.
constexpr BackwardConfig backward_config(int head_dim, int head_dim_v, bool band, int tile_m,
                                         ScoreKind score = ScoreKind::kPlain) {
  for (const BackwardConfig& c : kBackwardConfigs) {
    if (c.head_dim == head_dim && c.head_dim_v == head_dim_v && c.band == band &&
        c.tile_m == tile_m && c.score == score)
      return c;
  }
  return {};
}

}  // namespace flash3::hopper
