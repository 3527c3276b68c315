// SPDX-License-Identifier: Apache-2.0
// The kernels, and which of them, with which packings and slots, give the right answer to a call.
// plan.cpp takes one.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/device/tile_schedule.hpp"
#include "cuda/sm90/forward/limits.hpp"

namespace flash3::cuda::sm90 {

// Keys that boxes of pages must divide.
constexpr int rows_at_once(const ForwardConfig& c) { return c.widened() ? c.raw_rows() : c.tile_n; }

struct ForwardKernel {
  std::string id;  // "fwd_bf16_d128_band_192x80", "fwd_bf16_d128_softcap_128x128"
  Element element;
  ForwardConfig config;
  const void* function;  // for cudaLaunchKernel
};

// Every kernel built in, in the order of the tile table; those of an element.
std::span<const ForwardKernel> forward_kernels();
std::span<const ForwardKernel> forward_kernels(Element element);

// One way to run a problem: which kernel, and how many query heads of a KV head, or how many rows
// of short ragged sequences, share a tile.
struct ForwardChoice {
  const ForwardKernel* kernel = nullptr;
  HeadPack pack;
  int slot_rows = 0;  // TileSchedule

  bool shares_tiles() const { return pack.heads > 1 || slot_rows > 0; }
};

// Calls visit for each way that gives the right answer. They are the kernels of the narrowest head
// dims that hold the call's; each with one head a tile, with heads packed by every divisor of the
// heads per KV head that fits a warpgroup's rows (in FP8 on a cache alone), and with slots where
// max_seqlen is small enough. None if no kernel takes the dtype or the head dims.
void for_each_choice(const ForwardProblem& problem,
                     const std::function<void(const ForwardChoice&)>& visit);
std::vector<ForwardChoice> forward_choices(const ForwardProblem& problem);

// Whether there are kernels for q of this dtype.
bool takes(flash3_dtype dtype);

// Why no forward kernel reads the problem's keys, whatever its tiles; empty if some may.
std::string why_unreadable(const ForwardProblem& problem);
// Why there is no choice for keys that are readable.
std::string why_no_choice(const ForwardProblem& problem);

// FP8 sums up O in two levels where a query may see more keys, unless the call says otherwise.
inline constexpr int64_t kLongRow = 2048;
// Whether O is summed up in two levels, if the operands are FP8.
bool sums_in_two_levels(const ForwardProblem& problem);

}  // namespace flash3::cuda::sm90
