// SPDX-License-Identifier: Apache-2.0
// The tile table of the backward kernels, like the forward's.
#pragma once

#include "cuda/sm90/backward/limits.hpp"

namespace flash3::cuda::sm90 {

// A call takes the first row that holds its head dims and whose from_queries it reaches. The
// comment after a row: TFLOP/s and the ratio to cuDNN in the same run, bf16, 16k tokens of one
// sequence, hidden size 2048, H200. Rows without one were not measured beside a peer.
// clang-format off
inline constexpr BackwardConfig kBackwardConfigs[] = {
    {.head_dim = 64, .head_dim_v = 64, .band = false, .tile_m = 128, .tile_n = 128, .persistent = true},  // 560, 1.28
    {.head_dim = 64, .head_dim_v = 64, .band = true, .tile_m = 128, .tile_n = 128, .persistent = true},  // 536, 1.30
    {.head_dim = 96, .head_dim_v = 96, .band = false, .tile_m = 96, .tile_n = 128},  // 525 at 16k
    {.head_dim = 96, .head_dim_v = 96, .band = true, .tile_m = 96, .tile_n = 128},  // 472 at 16k
    {.head_dim = 128, .head_dim_v = 128, .band = false, .tile_m = 80, .tile_n = 128, .from_queries = 1024},  // 674, 1.23
    {.head_dim = 128, .head_dim_v = 128, .band = false, .tile_m = 64, .tile_n = 128, .persistent = true},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .tile_m = 80, .tile_n = 128, .from_queries = 8192},  // 629, 1.18
    {.head_dim = 128, .head_dim_v = 128, .band = true, .tile_m = 64, .tile_n = 128, .persistent = true},  // 532, 1.19 at 4k
    {.head_dim = 192, .head_dim_v = 128, .band = false, .tile_m = 64, .tile_n = 64, .wide = true},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .tile_m = 64, .tile_n = 64, .wide = true},
    {.head_dim = 192, .head_dim_v = 192, .band = false, .tile_m = 64, .tile_n = 64, .wide = true},
    {.head_dim = 192, .head_dim_v = 192, .band = true, .tile_m = 64, .tile_n = 64, .wide = true},
    {.head_dim = 256, .head_dim_v = 256, .band = false, .tile_m = 64, .tile_n = 64, .wide = true},  // 503, 1.47
    {.head_dim = 256, .head_dim_v = 256, .band = true, .tile_m = 64, .tile_n = 64, .wide = true},  // 492, 1.33
    // Softcaps, under any mask. Causal, cap 50: 0.80, 0.84 (from 8k) and 0.99 of the plain kernels.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap, .tile_m = 96, .tile_n = 128, .persistent = true},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .tile_m = 80, .tile_n = 128, .from_queries = 8192},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .tile_m = 64, .tile_n = 128, .persistent = true},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap, .tile_m = 64, .tile_n = 64, .wide = true},
    // Masks as lists of blocks of 128 queries by 128 keys. Not measured.
    {.head_dim = 64, .head_dim_v = 64, .lists = true, .tile_m = 128, .tile_n = 128, .persistent = true},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .tile_m = 64, .tile_n = 128, .persistent = true},
    {.head_dim = 192, .head_dim_v = 192, .lists = true, .tile_m = 64, .tile_n = 64, .wide = true},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .tile_m = 64, .tile_n = 64, .wide = true},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .score = ScoreKind::kSoftcap, .tile_m = 64, .tile_n = 128},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .score = ScoreKind::kSoftcap, .tile_m = 64, .tile_n = 64, .wide = true},
    // Biased scores, with a softcap too: under any band, and under masks as lists. Not measured.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kSlopes, .tile_m = 128, .tile_n = 128, .persistent = true},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kTable, .tile_m = 96, .tile_n = 128, .persistent = true},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kPairs, .tile_m = 96, .tile_n = 128},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kDropout, .tile_m = 96, .tile_n = 128, .persistent = true},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kSlopes, .tile_m = 64, .tile_n = 128, .persistent = true},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kTable, .tile_m = 64, .tile_n = 128, .persistent = true},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kPairs, .tile_m = 64, .tile_n = 128},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kDropout, .tile_m = 64, .tile_n = 128, .persistent = true},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .tile_m = 80, .tile_n = 128, .persistent = true},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .tile_m = 64, .tile_n = 128},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .tile_m = 64, .tile_n = 64, .wide = true},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .tile_m = 64, .tile_n = 128},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .tile_m = 64, .tile_n = 64, .wide = true},
};
// clang-format on

constexpr bool all_backward_valid() {
  for (const BackwardConfig& c : kBackwardConfigs) {
    if (!is_valid(c)) return false;
  }
  return true;
}
static_assert(all_backward_valid(), "a row of the tile table exceeds shared memory or registers");

// The widest V of the rows with this tile height.
constexpr int widest_head_dim_v(int tile_m) {
  int widest = 0;
  for (const BackwardConfig& c : kBackwardConfigs)
    if (c.tile_m == tile_m && c.head_dim_v > widest) widest = c.head_dim_v;
  return widest;
}

}  // namespace flash3::cuda::sm90
