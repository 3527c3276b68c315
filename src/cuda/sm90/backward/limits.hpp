// SPDX-License-Identifier: Apache-2.0
// What a row of the backward's tile table takes of a multiprocessor, and whether that is there,
// like the forward's.
#pragma once

#include "core/mask_lists.hpp"
#include "cuda/sm90/backward/config.hpp"
#include "cuda/sm90/backward/params.h"

namespace flash3::cuda::sm90 {

// The epilogue stages dK and dV where K and V were, that of persistent blocks where dS and K were.
FLASH3_HOST_DEVICE constexpr int bytes_beside_lists(const BackwardConfig& c) {
  const int slots = c.key_tile_slots();
  const int barriers = 7 + 4 * slots + 2 * (kConsumerWarpgroups + 1 + kDsStages + 2 * kQueryStages);
  const int queries = c.tile_m * ((c.head_dim + c.head_dim_v) * 2 + 8);  // LSE and delta too
  const int bias_stages = c.bias_tiles() ? kQueryStages : 0;
  return c.tile_n * (slots * c.head_dim + c.head_dim_v) * 2 + kQueryStages * queries +
         (kDsStages + bias_stages) * c.tile_m * c.tile_n * 2 + c.fragment_quads() * 2048 +
         (8 * barriers + c.mask_keys() * 8 + slots * int(sizeof(KeyTile)) + 4 + 15) / 16 * 16;
}

// What goes with a listed query tile: a range of keys a query, or, where there is room for it, a
// bit a pair. Otherwise threads read bits where they lie.
FLASH3_HOST_DEVICE constexpr int range_words(const BackwardConfig& c) { return c.tile_m * 2; }
FLASH3_HOST_DEVICE constexpr int bit_words(const BackwardConfig& c) {
  return c.tile_m * c.tile_n / 32;
}
FLASH3_HOST_DEVICE constexpr int listed_bytes(const BackwardConfig& c, int words) {
  return c.lists ? kQueryStages * (words * 4 + 16) : 0;
}
FLASH3_HOST_DEVICE constexpr bool stages_bits(const BackwardConfig& c) {
  return bytes_beside_lists(c) + listed_bytes(c, bit_words(c)) <= kMostSharedBytes;
}
FLASH3_HOST_DEVICE constexpr int mask_words(const BackwardConfig& c) {
  return stages_bits(c) && bit_words(c) > range_words(c) ? bit_words(c) : range_words(c);
}
FLASH3_HOST_DEVICE constexpr int shared_memory_bytes(const BackwardConfig& c) {
  return bytes_beside_lists(c) + listed_bytes(c, mask_words(c));
}

constexpr bool is_valid(const BackwardConfig& c) {
  const int gradients = (c.wide ? c.head_dim : c.head_dim + c.head_dim_v) / 2,
            scores = c.tile_m / 2;
  // A consumer warpgroup computes half of dQ: one block of 64 × 64, or one transposed block.
  const bool halves = (c.head_dim == 64 || c.dq_columns() == 128) &&
                      (c.dq_transposed() || c.tile_m * c.head_dim == kConsumerWarpgroups * 64 * 64);
  return shared_memory_bytes(c) <= kMostSharedBytes && c.head_dim % 32 == 0 &&
         c.head_dim_v % 32 == 0 && c.head_dim_v <= c.head_dim && c.tile_n == (c.wide ? 64 : 128) &&
         (!c.lists || (!c.band && kMaskBlock % c.tile_m == 0 && kMaskBlock % c.tile_n == 0 &&
                       c.tile_n >= 64)) &&
         (c.wide ? c.tile_m == 64 : halves) && !(c.persistent && c.wide) &&
         128 * (c.producer_registers() + c.dq_registers() +
                kConsumerWarpgroups * c.consumer_registers()) <=
             c.threads() * c.launch_registers() &&
         gradients + 2 * scores + 16 <= c.consumer_registers();
}

}  // namespace flash3::cuda::sm90
