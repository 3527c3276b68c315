// SPDX-License-Identifier: Apache-2.0
// The forward kernels of `flash3 bench --ablation`: one per schedule, each an instance of the
// library's own kernel template. They are linked into the tools and not into the library.
#pragma once

#include "hopper/forward/config.hpp"

namespace flash3::device {

// Where the paper measured; fp16, no mask. A row of the tile table: its kernel in the library is
// the one that all others are compared with.
inline constexpr int kAblationHeadDim = 128;
inline constexpr int kAblationTileN = 128;
// Two tiles of scores: with 96 keys registers spill.
inline constexpr int kThreeStageTileN = 80;

inline constexpr hopper::ForwardSchedule kNoPingPong = {.ping_pong = false};
inline constexpr hopper::ForwardSchedule kNoOverlap = {.overlap = false};
inline constexpr hopper::ForwardSchedule kNotSpecialised = {.specialised = false};
inline constexpr hopper::ForwardSchedule kThreeStage = {.three_stage = true, .from_table = false};
// The library's schedule in the tiles of the three-stage one.
inline constexpr hopper::ForwardSchedule kSmallTiles = {.from_table = false};

// FP8, in the same tiles: what of these its kernel has, and what only it has.
inline constexpr hopper::ForwardSchedule kNoLazyMaximum = {.lazy_maximum = false};
inline constexpr int kFp8SmallTileN = 64;

// The address of one variant's kernel; one translation unit each.
template <hopper::ForwardSchedule kSchedule, int kTileN>
const void* ablation_kernel();
template <hopper::ForwardSchedule kSchedule, int kTileN>
const void* fp8_ablation_kernel();

}  // namespace flash3::device
