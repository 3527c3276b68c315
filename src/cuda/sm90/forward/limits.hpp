// SPDX-License-Identifier: Apache-2.0
// What a row of the forward's tile table takes of a multiprocessor, and whether that is there: the
// host and the table ask, and kernels make sure that their shared memory is what is counted here.
#pragma once

#include "core/mask_lists.hpp"
#include "core/scales.hpp"
#include "cuda/sm90/device/bias_tiles.hpp"
#include "cuda/sm90/forward/config.hpp"

namespace flash3::cuda::sm90 {

// Barriers, the ring of work tiles, and what is noted of rows, scales, splits and listed tiles.
FLASH3_HOST_DEVICE constexpr int control_bytes(const ForwardConfig& c) {
  const int barriers = 2 * c.warpgroups * c.q_stages + 4 * c.stages +
                       2 * c.raw_v_stages * c.raw_v_parts() + 2 * c.raw_stages + 1 +
                       (c.bias_tiles() ? 2 * c.warpgroups * kBiasStages : 0);
  const int tile_ring = 2408;                              // device/scheduler.cuh
  const int rows = c.tile_m() / 16 * 40 + c.tile_m() * 8;  // forward/warp_rows.cuh
  const int q_scales = c.q_stages * 4 * (c.row_scales() ? c.tile_m() : 4);
  const int scales = c.fp8()       ? 2 * c.stages * 8 + q_scales
                     : c.widened() ? (2 * c.stages + c.raw_stages) * 8
                                   : 0;
  const int splits_bytes = c.split ? 16 * (4 + 4 * c.warpgroups) : 0;  // device/key_splits.hpp
  const int blocks = c.lists ? 8 * c.stages : 0;                       // forward/load_lists.cuh
  return 8 * barriers + tile_ring + rows + scales + splits_bytes + blocks;
}

// 16 bits: the output is staged in Q's place, each warpgroup's own rows, once its last Q·Kᵀ is
// done.
FLASH3_HOST_DEVICE constexpr int bytes_beside_sums(const ForwardConfig& c) {
  const int q = c.tile_m() * c.head_dim, k = c.tile_n * c.head_dim, v = c.tile_n * c.head_dim_v,
            transposed_v = transposed_v_cols(c.tile_n) * c.head_dim_v;
  return (c.q_stages * q + c.stages * (k + (c.fp8() ? transposed_v : v)) + c.raw_v_stages * v) *
             c.element_bytes() +
         c.raw_stages * c.raw_bytes() +
         (c.bias_tiles() ? kBiasStages * c.tile_m() * c.tile_n * 2 : 0) + control_bytes(c);
}

// Of the factors that the second level of sums is multiplied by.
FLASH3_HOST_DEVICE constexpr int factors_bytes(const ForwardConfig& c) {
  return c.two_level ? c.tile_m() * 16 : 0;
}

FLASH3_HOST_DEVICE constexpr bool sums_in_shared(const ForwardConfig& c) {
  return c.two_level &&
         bytes_beside_sums(c) + factors_bytes(c) + c.sums_bytes() <= kMostSharedBytes;
}
FLASH3_HOST_DEVICE constexpr int shared_memory_bytes(const ForwardConfig& c) {
  return bytes_beside_sums(c) + factors_bytes(c) + (sums_in_shared(c) ? c.sums_bytes() : 0);
}

constexpr bool is_valid(const ForwardConfig& c) {
  const int probability_registers = c.tile_n / 8 * c.element_bytes();
  return (!c.paged || c.band || (c.lists && !c.fp8())) && (!c.split || (c.paged && !c.lists)) &&
         (!c.lists || (!c.widened() && !c.band && c.tile_m() == kMaskBlock &&
                       (c.tile_n == kMaskBlock || (!c.fp8() && 2 * c.tile_n == kMaskBlock)))) &&
         (!c.widened() ||
          (c.paged && c.raw_rows() % 16 == 0 && int(kScaleBlock) % c.tile_n == 0)) &&
         shared_memory_bytes(c) <= kMostSharedBytes && c.tile_n % 16 == 0 && c.tile_n <= 256 &&
         c.head_dim_v <= c.head_dim && c.warpgroups >= 2 && c.warpgroups <= 4 &&
         128 * (c.producer_registers() + c.warpgroups * c.consumer_registers()) <=
             c.threads() * c.launch_registers() &&
         c.accumulators() + probability_registers + 16 <= c.consumer_registers();
}

}  // namespace flash3::cuda::sm90
