// SPDX-License-Identifier: Apache-2.0
// What a way of cutting the work is expected to cost. The one home of that guess: plan.cpp takes
// the cheapest, and `explain` prints it.
#pragma once

#include "core/problem.hpp"
#include "cuda/device/tile_schedule.hpp"
#include "cuda/sm90/forward/config.hpp"

namespace flash3::cuda::sm90 {

struct Estimate {
  int64_t m_tiles = 0;  // query tiles per head group
  int64_t tiles = 0;    // work tiles in all; of a ragged batch at most
  double us = 0;        // microseconds
};

// The problem in tiles of this kernel, with the query heads packed like this (pack.heads divides
// problem.queries_per_kv_head()) or with slots of so many rows (TileSchedule; 0: none), on so many
// multiprocessors. A ragged batch tells only its longest lengths: all sequences count as
// that long, and as one of very many, so that no sequence's kernel depends on the others.
Estimate estimate_forward(const ForwardProblem& problem, const ForwardConfig& config,
                          const HeadPack& pack, int slot_rows, int multiprocessors);

// By how much another way must promise to be faster before it is taken. What packing heads saves
// under a causal mask, by query rows that end together, is what it was measured to save.
inline constexpr double kRowMargin = 0.01, kPackMargin = 0.015;

// Whether to take `other` rather than `best`: it is clearly faster, or no slower with half the
// tiles, which spares power and reads of K and V.
bool is_better(const Estimate& other, const Estimate& best, double margin);

// Into how many splits the keys of each work tile of a sequence with so many of them are best
// split: 1 where they fill a GPU. Neither the batch nor the device counts, so that a sequence has
// the same bits in any batch.
int most_key_splits(int64_t tiles);

}  // namespace flash3::cuda::sm90
