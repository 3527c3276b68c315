// The forward kernels of `flash3 bench --ablation`: one per schedule, each an instance of the
// library's own kernel template. They are linked into the tools and not into the library.
#pragma once

#include "hopper/forward/config.hpp"

namespace flash3::device {

// Where the paper measured, fp16 and without a mask. The tiles are the library's; what the table of
// tiles takes for this shape is the schedule that all others are compared with.
inline constexpr int kAblationHeadDim = 128;
inline constexpr int kAblationTileN = 128;
// Two tiles of scores: with 96 keys registers spill.
inline constexpr int kThreeStageTileN = 80;

inline constexpr hopper::ForwardSchedule kNoPingPong = {.ping_pong = false};
inline constexpr hopper::ForwardSchedule kNoOverlap = {.overlap = false};
inline constexpr hopper::ForwardSchedule kNotSpecialised = {.specialised = false};
inline constexpr hopper::ForwardSchedule kThreeStage = {.three_stage = true};

// The address of one variant's kernel; one translation unit each.
template <hopper::ForwardSchedule kSchedule, int kTileN>
const void* ablation_kernel();

}  // namespace flash3::device
