// The tile table of the backward kernels, and what follows from a row. constexpr and NVRTC-clean,
// like the forward's.
#pragma once

#include "hopper/backward/key_schedule.hpp"
#include "hopper/device/score_kind.hpp"

namespace flash3::hopper {

// How the two consumer warpgroups of a block share the work on its keys. README.md draws each.
enum class BackwardForm {
  kSteps,  // 64 keys each, dK and dV in registers; a query tile in steps of 64, S a step ahead
  kTall,   // likewise, a query tile in one step; dQ computed transposed
  kWide    // the same 64 keys, dV in the registers of one and dK in those of the other
};

inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kStepQueries = 64;  // whose scores a warpgroup computes at once; not kTall

// One kernel: a block owns tile_n keys, whose dK and dV stay in registers, and walks over query
// tiles of tile_m. Q (with its LSE) and dOut (with delta) each travel through a ring.
struct BackwardConfig {
  int head_dim;
  int head_dim_v;
  bool band;         // masks by the band; otherwise only the end of the keys
  int from_queries;  // for calls of at least so many
  int tile_m;
  int q_stages;
  int dout_stages;
  BackwardForm form;
  ScoreKind score = ScoreKind::kPlain;

  FLASH3_HOST_DEVICE constexpr bool wide() const { return form == BackwardForm::kWide; }
  FLASH3_HOST_DEVICE constexpr bool tall() const { return form == BackwardForm::kTall; }
  FLASH3_HOST_DEVICE constexpr int tile_n() const { return wide() ? 64 : 128; }
  FLASH3_HOST_DEVICE constexpr int threads() const { return 128 * (kConsumerWarpgroups + 1); }

  // Registers per thread after setmaxnreg; see forward/config.hpp. A wide kernel's producer
  // computes dQ.
  FLASH3_HOST_DEVICE constexpr int producer_registers() const { return wide() ? 72 : 24; }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const { return wide() ? 216 : 240; }
  FLASH3_HOST_DEVICE constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }

  // Queries whose scores a warpgroup computes at once.
  FLASH3_HOST_DEVICE constexpr int step_queries() const { return tall() ? tile_m : kStepQueries; }

  // dQ of a query tile is computed, and lies in the workspace, in blocks of 64 columns.
  FLASH3_HOST_DEVICE constexpr int dq_queries() const { return tall() ? tile_m : 64; }

  // Float32 on its way between registers: dQ to the warp that adds it, or P of a wide tile from one
  // warpgroup to the other. In float4 of each thread of a warpgroup.
  FLASH3_HOST_DEVICE constexpr int fragment_quads() const {
    return wide() ? 8 : tile_m * head_dim / 512;
  }

  // Rows of the mask that lie in shared memory; without a band none is read.
  FLASH3_HOST_DEVICE constexpr int mask_rows() const { return band ? tile_n() : 1; }

  // Shared memory in bytes. dK and dV are staged in the places of K and V.
  FLASH3_HOST_DEVICE constexpr int q_bytes() const { return tile_m * (head_dim * 2 + 4); }
  FLASH3_HOST_DEVICE constexpr int dout_bytes() const { return tile_m * (head_dim_v * 2 + 4); }
  FLASH3_HOST_DEVICE constexpr int ds_bytes() const { return 2 * tile_m * tile_n() * 2; }
  FLASH3_HOST_DEVICE constexpr int shared_bytes() const {
    const int barriers = 3 + 2 * (kConsumerWarpgroups + 1 + 2 + q_stages + dout_stages);
    return tile_n() * (head_dim + head_dim_v) * 2 + q_stages * q_bytes() +
           dout_stages * dout_bytes() + ds_bytes() + fragment_quads() * 2048 +
           (8 * barriers + int(sizeof(KeyTile)) + mask_rows() * 8 +
            kConsumerWarpgroups * int(sizeof(WholeSteps)) + 15) /
               16 * 16;
  }
};

// A call takes the first row that holds its head dims and whose from_queries it reaches. Behind a
// row: TFLOP/s and the ratio to cuDNN in the same run, bf16, 16k tokens of one sequence, hidden
// size 2048, H200.
inline constexpr BackwardConfig kBackwardConfigs[] = {
    // D, Dv, band, from_queries, tile_m, q_stages, dout_stages, form
    {64, 64, false, 0, 128, 3, 2, BackwardForm::kSteps},    // 539, 1.22
    {64, 64, true, 0, 128, 3, 2, BackwardForm::kSteps},     // 518, 1.25
    {128, 128, false, 0, 80, 2, 2, BackwardForm::kTall},    // 633, 1.17
    {128, 128, true, 8192, 80, 2, 2, BackwardForm::kTall},  // 606, 1.16
    {128, 128, true, 0, 64, 3, 2, BackwardForm::kSteps},    // 498, 1.10 at 4k
    {192, 128, false, 0, 64, 2, 2, BackwardForm::kWide},    // not measured beside a peer
    {192, 128, true, 0, 64, 2, 2, BackwardForm::kWide},     // not measured beside a peer
    {192, 192, false, 0, 64, 2, 2, BackwardForm::kWide},    // not measured beside a peer
    {192, 192, true, 0, 64, 2, 2, BackwardForm::kWide},     // not measured beside a peer
    {256, 256, false, 0, 64, 2, 2, BackwardForm::kWide},    // 453, 1.31
    {256, 256, true, 0, 64, 2, 2, BackwardForm::kWide},     // 456, 1.18
    // Softcaps, under any mask. Not measured.
    {64, 64, true, 0, 128, 3, 2, BackwardForm::kSteps, ScoreKind::kSoftcap},
    {128, 128, true, 8192, 80, 2, 2, BackwardForm::kTall, ScoreKind::kSoftcap},
    {128, 128, true, 0, 64, 3, 2, BackwardForm::kSteps, ScoreKind::kSoftcap},
    {256, 256, true, 0, 64, 2, 2, BackwardForm::kWide, ScoreKind::kSoftcap},
};

constexpr bool is_valid(const BackwardConfig& c) {
  const int gradients = (c.wide() ? c.head_dim : c.head_dim + c.head_dim_v) / 2,
            scores = c.step_queries() / 2;
  return c.shared_bytes() <= 227 * 1024 && c.head_dim % 64 == 0 && c.head_dim_v % 64 == 0 &&
         c.head_dim_v <= c.head_dim &&
         (c.tall() ? c.tile_m % 16 == 0 && c.tile_m <= 80 && c.head_dim == 64 * kConsumerWarpgroups
                   : c.tile_m % 64 == 0) &&
         (!c.wide() || c.tile_m == 64) && c.q_stages >= 2 && c.dout_stages == 2 &&
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
