// The tile table of the backward kernels, and what follows from a row. constexpr and NVRTC-clean,
// like the forward's.
#pragma once

#include "core/host_device.hpp"

namespace flash3::hopper {

// One kernel: a block owns tile_n keys, whose dK and dV stay in registers: 64 keys a warpgroup, or
// where they are wider than that (`wide`) dV of the same 64 keys in one warpgroup and dK in the
// other. It walks over query tiles of tile_m, 64 queries a step. Q (with its LSE) and dOut (with
// delta) each travel through a ring.
struct BackwardConfig {
  int head_dim;
  int head_dim_v;
  bool band;  // masks by the band; otherwise only the end of the keys
  int tile_m;
  int warpgroups;
  int q_stages;
  int dout_stages;
  bool wide;

  FLASH3_HOST_DEVICE constexpr int tile_n() const { return wide ? 64 : 64 * warpgroups; }
  FLASH3_HOST_DEVICE constexpr int threads() const { return 128 * (warpgroups + 1); }

  // Registers per thread after setmaxnreg; see forward/config.hpp.
  FLASH3_HOST_DEVICE constexpr int producer_registers() const { return warpgroups == 3 ? 32 : 24; }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const {
    return warpgroups == 2 ? 240 : 160;
  }
  FLASH3_HOST_DEVICE constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }

  // dQ of a query tile is computed in blocks of 64 × 64, dealt out to the warpgroups.
  static constexpr int kDqBlockBytes = 64 * 64 * 4;
  FLASH3_HOST_DEVICE constexpr int dq_blocks() const { return tile_m / 64 * (head_dim / 64); }

  // dS of a tile; and 64 × 64 blocks of float32: dQ on its way out, or P on its way from one
  // warpgroup to the other.
  FLASH3_HOST_DEVICE constexpr int ds_slots() const { return wide ? 1 : 2; }
  FLASH3_HOST_DEVICE constexpr int fragment_slots() const { return wide ? 1 : dq_blocks(); }

  // Shared memory in bytes. dK and dV are staged in the places of K and V.
  FLASH3_HOST_DEVICE constexpr int q_bytes() const { return tile_m * (head_dim * 2 + 4); }
  FLASH3_HOST_DEVICE constexpr int dout_bytes() const { return tile_m * (head_dim_v * 2 + 4); }
  FLASH3_HOST_DEVICE constexpr int ds_bytes() const { return ds_slots() * tile_m * tile_n() * 2; }
  FLASH3_HOST_DEVICE constexpr int shared_bytes() const {
    const int barriers = 2 + warpgroups + 2 * (q_stages + dout_stages);
    return tile_n() * (head_dim + head_dim_v) * 2 + q_stages * q_bytes() +
           dout_stages * dout_bytes() + ds_bytes() + fragment_slots() * kDqBlockBytes +
           (8 * barriers + 4 + 15) / 16 * 16;
  }
};

inline constexpr int kStepQueries = 64;

// A call takes the first row that holds its head dims. Behind a row: TFLOP/s and the ratio to cuDNN
// in the same run, bf16, 16k tokens of one sequence, hidden size 2048, H200, 2026-11-21.
inline constexpr BackwardConfig kBackwardConfigs[] = {
    // D, Dv, band, tile_m, warpgroups, q_stages, dout_stages, wide
    {64, 64, false, 128, 2, 3, 2, false},   // 492, 1.11
    {64, 64, true, 128, 2, 3, 2, false},    // 495, 1.15
    {128, 128, false, 64, 2, 3, 2, false},  // 597, 1.08
    {128, 128, true, 64, 2, 3, 2, false},   // 583, 1.11
    {192, 128, false, 64, 2, 2, 2, true},   // not measured beside a peer
    {192, 128, true, 64, 2, 2, 2, true},    // not measured beside a peer
    {192, 192, false, 64, 2, 2, 2, true},   // not measured beside a peer
    {192, 192, true, 64, 2, 2, 2, true},    // not measured beside a peer
    {256, 256, false, 64, 2, 2, 2, true},   // 414, 1.16
    {256, 256, true, 64, 2, 2, 2, true},    // 418, 1.04
};

constexpr bool is_valid(const BackwardConfig& c) {
  const int gradients = (c.wide ? c.head_dim : c.head_dim + c.head_dim_v) / 2,
            scores = kStepQueries / 2;
  return c.shared_bytes() <= 227 * 1024 && c.tile_m % 64 == 0 && c.head_dim % 64 == 0 &&
         c.head_dim_v % 64 == 0 && c.head_dim_v <= c.head_dim &&
         (c.wide ? c.tile_m == 64 && c.warpgroups == 2 : c.dq_blocks() % c.warpgroups == 0) &&
         128 * (c.producer_registers() + c.warpgroups * c.consumer_registers()) <=
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

// The row of a kernel instance; no head dims if there is none.
constexpr BackwardConfig backward_config(int head_dim, int head_dim_v, bool band) {
  for (const BackwardConfig& c : kBackwardConfigs) {
    if (c.head_dim == head_dim && c.head_dim_v == head_dim_v && c.band == band) return c;
  }
  return {};
}

}  // namespace flash3::hopper
