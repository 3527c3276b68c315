// The tile table of the forward kernels, and what follows from a row. constexpr and NVRTC-clean:
// the kernels, the launcher, `explain` and the tests all read this one table, and a row that cannot
// work fails the build.
#pragma once

#include "core/host_device.hpp"

namespace flash3::hopper {

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

  FLASH3_HOST_DEVICE constexpr int tile_m() const { return 64 * warpgroups; }
  FLASH3_HOST_DEVICE constexpr int threads() const { return 128 * (1 + warpgroups); }

  // Registers per thread after setmaxnreg. Together at most what the block was launched with: a
  // warpgroup that asks for more waits for ever.
  FLASH3_HOST_DEVICE constexpr int producer_registers() const { return warpgroups == 2 ? 24 : 32; }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const {
    return warpgroups == 2 ? 240 : 160;
  }
  // What the block starts with: the launch bound's share, which ptxas reports.
  FLASH3_HOST_DEVICE constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }

  // Shared memory in bytes. The output is staged in Q's place: each warpgroup's own rows, once its
  // last Q·Kᵀ is done.
  FLASH3_HOST_DEVICE constexpr int q_bytes() const { return tile_m() * head_dim * 2; }
  FLASH3_HOST_DEVICE constexpr int k_bytes() const { return tile_n * head_dim * 2; }
  FLASH3_HOST_DEVICE constexpr int v_bytes() const { return tile_n * head_dim_v * 2; }
  FLASH3_HOST_DEVICE constexpr int control_bytes() const {
    const int barriers = 2 * warpgroups * q_stages + 4 * stages;
    const int tile_ring = 88;  // device/scheduler.cuh
    return 8 * barriers + tile_ring;
  }
  FLASH3_HOST_DEVICE constexpr int shared_bytes() const {
    return q_stages * q_bytes() + stages * (k_bytes() + v_bytes()) + control_bytes();
  }
};

inline constexpr int kMaxSharedBytes = 227 * 1024;

// Sorted so that the first row that is wide enough is the cheapest. Behind a row: TFLOP/s at 16k
// tokens (bf16, hidden size 2048, band: causal) and the ratio to cuDNN in the same run, H200,
// 2026-11-20.
inline constexpr ForwardConfig kForwardConfigs[] = {
    // D, Dv, band, tile_n, warpgroups, stages, q_stages
    {64, 64, false, 128, 3, 2, 2},    // 544, 1.20
    {64, 64, true, 128, 3, 2, 2},     // 508, 1.15
    {96, 96, false, 128, 2, 2, 2},    // not measured beside a peer
    {96, 96, true, 128, 2, 2, 2},     // not measured beside a peer
    {128, 128, false, 176, 2, 2, 1},  // 689, 1.11
    {128, 128, true, 128, 2, 2, 2},   // 641, 1.10
    {192, 128, false, 128, 2, 2, 1},  // not measured beside a peer
    {192, 128, true, 128, 2, 2, 1},   // not measured beside a peer
    {192, 192, false, 112, 2, 2, 1},  // not measured beside a peer
    {192, 192, true, 96, 2, 2, 1},    // not measured beside a peer
    {256, 256, false, 80, 2, 2, 1},   // 775, 1.16
    {256, 256, true, 80, 2, 2, 1},    // 618, 1.00
};

constexpr bool is_valid(const ForwardConfig& c) {
  const int score_registers = c.tile_n / 2, probability_registers = c.tile_n / 4,
            output_registers = c.head_dim_v / 2;
  return c.shared_bytes() <= kMaxSharedBytes && c.tile_n % 16 == 0 && c.tile_n <= 256 &&
         c.head_dim_v <= c.head_dim && (c.warpgroups == 2 || c.warpgroups == 3) &&
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

// The row for a kernel instance, by its exact dimensions.
constexpr ForwardConfig forward_config(int head_dim, int head_dim_v, bool band) {
  for (const ForwardConfig& c : kForwardConfigs) {
    if (c.head_dim == head_dim && c.head_dim_v == head_dim_v && c.band == band) return c;
  }
  return {};
}

}  // namespace flash3::hopper
