// SPDX-License-Identifier: Apache-2.0
// The tile table of the forward kernels: the launcher, `explain` and the tests all read this one
// table, and a row that cannot work fails the build. cmake/kernel_instances.cmake counts the rows
// by the lines that begin with {.head_dim.
#pragma once

#include "cuda/sm90/forward/limits.hpp"

namespace flash3::cuda::sm90 {

// Head dims and mask choose a group of rows, the narrowest that is wide enough; within it
// forward/estimate.cpp takes the row that is expected to be the fastest. key_tile_us and tile_us
// are fitted to bf16, 16k tokens, hidden size 2048, band: causal, H200, 2026-11-21. After a row:
// TFLOP/s and the ratio to cuDNN in the same run, if there was one, and at which length; or what it
// gains over another row, beside which it is fitted (H100, 2026-11-26).
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
    {.head_dim = 96, .head_dim_v = 96, .band = false,
     .tile_n = 112, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.52, .tile_us = 1.8},  // 1.17 of 128 x 128 at 16k
    {.head_dim = 96, .head_dim_v = 96, .band = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.41, .tile_us = 1.7},  // 590, 1.34 at 16k
    {.head_dim = 96, .head_dim_v = 96, .band = true,
     .tile_n = 112, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.63, .tile_us = 1.8},  // 1.12 of 128 x 128 at 16k
    {.head_dim = 128, .head_dim_v = 128, .band = false,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 1.5},  // 533, 1.07 at 512
    {.head_dim = 128, .head_dim_v = 128, .band = false,
     .tile_n = 80, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.445, .tile_us = 1.6},  // 1.04 of 128 x 128 at 4k
    {.head_dim = 128, .head_dim_v = 128, .band = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 2.3},  // 576, 1.29 at 2k
    {.head_dim = 128, .head_dim_v = 128, .band = true,
     .tile_n = 80, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.49, .tile_us = 2.2},  // 1.04 of 128 x 128 at 8k
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
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    // Caches whose keys a table finds, under any mask. The head dims of the decode kernels, and tiles that the boxes of pages of 2^n
    // rows divide. Not measured: times are the plain rows'.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .paged = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.44, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 2.3},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.98, .tile_us = 4.2},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.51, .tile_us = 4.5},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap, .paged = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.58, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    // The same where the query tiles of a sequence do not fill a GPU, and of caches without a table too.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.44, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 2.3},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.98, .tile_us = 4.2},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .paged = true, .split = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.51, .tile_us = 4.5},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.58, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap, .paged = true, .split = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    // Masks as lists of blocks of 128 queries by 128 keys, with a softcap too; below 192 half blocks are for masks that tell these apart.
    // Not fitted: times are the plain rows'.
    {.head_dim = 64, .head_dim_v = 64, .lists = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.1, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .lists = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 2.3},
    {.head_dim = 64, .head_dim_v = 64, .lists = true,
     .tile_n = 64, .warpgroups = 2, .stages = 6, .q_stages = 2, .key_tile_us = 0.6, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .lists = true,
     .tile_n = 64, .warpgroups = 2, .stages = 5, .q_stages = 1, .key_tile_us = 0.9, .tile_us = 2.3},
    {.head_dim = 192, .head_dim_v = 192, .lists = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.2, .tile_us = 4.2},
    {.head_dim = 256, .head_dim_v = 256, .lists = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.51, .tile_us = 4.5},
    {.head_dim = 64, .head_dim_v = 64, .lists = true, .score = ScoreKind::kSoftcap,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.2, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .score = ScoreKind::kSoftcap,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .score = ScoreKind::kSoftcap,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    // The same of caches whose keys a table finds. Not measured.
    {.head_dim = 64, .head_dim_v = 64, .lists = true, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.1, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.65, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.51, .tile_us = 4.5},
    {.head_dim = 64, .head_dim_v = 64, .lists = true, .score = ScoreKind::kSoftcap, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.2, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .score = ScoreKind::kSoftcap, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .score = ScoreKind::kSoftcap, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    // Biased scores, with a softcap too: under any band, of caches, and under masks as lists. Not fitted.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kSlopes,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .key_tile_us = 1.58, .tile_us = 2.4},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kTable,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.58, .tile_us = 2.4},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kPairs,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.58, .tile_us = 2.4},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kDropout,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.58, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kSlopes,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.75, .tile_us = 2.3},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kTable,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kPairs,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kDropout,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.2, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.82, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.2, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 4, .q_stages = 2, .key_tile_us = 1.0, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .paged = true,
     .tile_n = 32, .warpgroups = 2, .stages = 4, .q_stages = 1, .key_tile_us = 0.9, .tile_us = 4.5},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .key_tile_us = 1.2, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .paged = true, .split = true,
     .tile_n = 64, .warpgroups = 2, .stages = 4, .q_stages = 2, .key_tile_us = 1.0, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .paged = true, .split = true,
     .tile_n = 32, .warpgroups = 2, .stages = 4, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny,
     .tile_n = 64, .warpgroups = 2, .stages = 5, .q_stages = 1, .key_tile_us = 1.0, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .key_tile_us = 1.66, .tile_us = 4.5},
    // FP8. Wide tiles for long sequences, as in 16 bits. Fitted to e4m3 (2026-11-22), but for d 192
    // and softcaps.
    {.head_dim = 64, .head_dim_v = 64, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.28, .tile_us = 2.9},
    {.head_dim = 64, .head_dim_v = 64, .band = false, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 4, .stages = 3, .q_stages = 2, .raw_v_stages = 3, .key_tile_us = 0.92, .tile_us = 2.6},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.28, .tile_us = 5.2},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 4, .stages = 3, .q_stages = 2, .raw_v_stages = 3, .key_tile_us = 0.92, .tile_us = 4.3},
    {.head_dim = 128, .head_dim_v = 128, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.30, .tile_us = 2.6},
    {.head_dim = 128, .head_dim_v = 128, .band = false, .operands = Operands::kE4m3,
     .tile_n = 192, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 1, .two_level = true, .key_tile_us = 1.70, .tile_us = 3.4},
    {.head_dim = 128, .head_dim_v = 128, .band = false, .operands = Operands::kE4m3,
     .tile_n = 96, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.43, .tile_us = 3.8},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.33, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3,
     .tile_n = 192, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 1, .two_level = true, .key_tile_us = 1.74, .tile_us = 4.8},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3,
     .tile_n = 96, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .key_tile_us = 1.40, .tile_us = 4.3},
    {.head_dim = 192, .head_dim_v = 128, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.2, .tile_us = 2.0},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.2, .tile_us = 3.0},
    {.head_dim = 192, .head_dim_v = 192, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 2.0},
    {.head_dim = 192, .head_dim_v = 192, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .band = false, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.18, .tile_us = 4.2},
    {.head_dim = 256, .head_dim_v = 256, .band = false, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 1, .two_level = true, .key_tile_us = 1.70, .tile_us = 4.9},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.18, .tile_us = 5.2},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 1, .two_level = true, .key_tile_us = 1.70, .tile_us = 5.4},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 2.0, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.6, .tile_us = 2.3},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.8, .tile_us = 3.0},
    {.head_dim = 192, .head_dim_v = 192, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.9, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.3, .tile_us = 4.0},
    // FP8 with slopes or a table, and any of both under a softcap. Not measured: times are the plain rows', 10 % longer a key tile.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kSlopes, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.41, .tile_us = 5.2},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .terms = BiasTerms::kTable, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.05, .tile_us = 3.6},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kSlopes, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.46, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kSlopes, .operands = Operands::kE4m3,
     .tile_n = 192, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 1, .two_level = true, .key_tile_us = 1.91, .tile_us = 4.8},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .terms = BiasTerms::kTable, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.46, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.8, .tile_us = 3.6},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.5, .tile_us = 5.2},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.8, .tile_us = 3.6},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.5, .tile_us = 5.2},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.8, .tile_us = 3.6},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3, .paged = true, .split = true,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.5, .tile_us = 5.2},
    {.head_dim = 64, .head_dim_v = 64, .lists = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.8, .tile_us = 3.6},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .score = ScoreKind::kBiased, .terms = BiasTerms::kAny, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 1, .two_level = true, .key_tile_us = 2.2, .tile_us = 5.4},
    // FP8 masks as lists, without a softcap. Not measured.
    {.head_dim = 64, .head_dim_v = 64, .lists = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 0.95, .tile_us = 3.6},
    {.head_dim = 128, .head_dim_v = 128, .lists = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.33, .tile_us = 3.6},
    {.head_dim = 192, .head_dim_v = 192, .lists = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .lists = true, .operands = Operands::kE4m3,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_v_stages = 1, .two_level = true, .key_tile_us = 1.70, .tile_us = 5.4},
    // FP8 caches whose keys a table finds, or of few queries a head. A tile's keys have one scale, each row of Q has its own. Not
    // measured: times are the plain rows'.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.28, .tile_us = 5.2},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.33, .tile_us = 3.6},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.2, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.18, .tile_us = 5.2},
    {.head_dim = 64, .head_dim_v = 64, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.4, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.6, .tile_us = 2.3},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .score = ScoreKind::kSoftcap, .operands = Operands::kE4m3, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.3, .tile_us = 4.0},
    // The same where the query tiles of a sequence do not fill a GPU. Those of scores with a softcap are not split.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kE4m3, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.28, .tile_us = 5.2},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.33, .tile_us = 3.6},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .operands = Operands::kE4m3, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 2, .raw_v_stages = 2, .two_level = true, .key_tile_us = 1.2, .tile_us = 3.0},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kE4m3, .paged = true, .split = true,
     .tile_n = 64, .warpgroups = 2, .stages = 3, .q_stages = 1, .raw_v_stages = 3, .two_level = true, .key_tile_us = 1.18, .tile_us = 5.2},
    // FP8 caches under a Q of 16 bits.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kWidened, .paged = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 2, .raw_stages = 4, .key_tile_us = 1.6, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kWidened, .paged = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_stages = 4, .key_tile_us = 1.9, .tile_us = 3.3},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .operands = Operands::kWidened, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_stages = 4, .key_tile_us = 1.2, .tile_us = 4.2},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kWidened, .paged = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_stages = 3, .key_tile_us = 1.7, .tile_us = 4.5},
    // The same where the query tiles of a sequence do not fill a GPU. At d 64 consumers have no registers for a second stage of Q.
    {.head_dim = 64, .head_dim_v = 64, .band = true, .operands = Operands::kWidened, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 3, .stages = 2, .q_stages = 1, .raw_stages = 4, .key_tile_us = 1.6, .tile_us = 2.4},
    {.head_dim = 128, .head_dim_v = 128, .band = true, .operands = Operands::kWidened, .paged = true, .split = true,
     .tile_n = 128, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_stages = 4, .key_tile_us = 1.9, .tile_us = 3.3},
    {.head_dim = 192, .head_dim_v = 128, .band = true, .operands = Operands::kWidened, .paged = true, .split = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_stages = 4, .key_tile_us = 1.2, .tile_us = 4.2},
    {.head_dim = 256, .head_dim_v = 256, .band = true, .operands = Operands::kWidened, .paged = true, .split = true,
     .tile_n = 64, .warpgroups = 2, .stages = 2, .q_stages = 1, .raw_stages = 3, .key_tile_us = 1.7, .tile_us = 4.5},
};
// clang-format on

constexpr bool all_valid() {
  for (const ForwardConfig& c : kForwardConfigs) {
    if (!is_valid(c)) return false;
  }
  return true;
}
static_assert(all_valid(), "a row of the tile table exceeds shared memory or registers");

// The row of a kernel that no table leads to its keys; no head dims if there is none.
constexpr ForwardConfig forward_config(Element element, int head_dim, int head_dim_v, bool band,
                                       ScoreKind score, int tile_m, int tile_n) {
  for (const ForwardConfig& c : kForwardConfigs) {
    if (!c.paged && !c.lists && c.holds(element) && c.head_dim == head_dim &&
        c.head_dim_v == head_dim_v && c.band == band && c.score == score && c.tile_m() == tile_m &&
        c.tile_n == tile_n)
      return c;
  }
  return {};
}

}  // namespace flash3::cuda::sm90
