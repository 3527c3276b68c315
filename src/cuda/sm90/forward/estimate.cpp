// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward/estimate.hpp"

#include <algorithm>
#include <cmath>

#include "core/arithmetic.hpp"
#include "cuda/device/key_splits.hpp"

namespace flash3::cuda::sm90 {
namespace {

// Key tiles that one query tile works on, over all query tiles of a head.
struct KeyTiles {
  double mean = 0;
  int64_t most = 0;
};

KeyTiles count_key_tiles(const Mask& mask, int64_t seq_q, int64_t seq_k,
                         const ForwardConfig& config, int64_t tile_queries, int64_t m_tiles) {
  // Enough for a sum of a few straight pieces, and cheap enough for every call.
  constexpr int64_t kMaxSamples = 16;
  const int64_t samples = std::min(m_tiles, config.band || config.lists ? kMaxSamples : 1);
  const double step = samples > 1 ? double(m_tiles - 1) / double(samples - 1) : 0;
  int64_t sum = 0, most = 0;
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t m_tile = std::llround(double(i) * step);  // the first and the last are among them
    const Range queries = {m_tile * tile_queries, std::min((m_tile + 1) * tile_queries, seq_q)};
    const int64_t count = mask.key_tiles(queries, seq_k, config.tile_n).size();
    sum += count;
    most = std::max(most, count);
  }
  return {samples > 0 ? double(sum) / double(samples) : 0, most};
}

int64_t tiles_of(int64_t rows, int64_t tile_rows) { return ceil_div(rows, tile_rows); }

}  // namespace

Estimate estimate_forward(const ForwardProblem& problem, const ForwardConfig& config,
                          const HeadPack& pack, int slot_rows, int multiprocessors) {
  const int64_t groups = problem.heads_q / pack.heads;
  const auto us = [&](double key_tiles) { return config.tile_us + key_tiles * config.key_tile_us; };
  Estimate e;
  if (slot_rows > 0) {
    e.m_tiles = tiles_of(problem.batch * slot_rows, config.tile_m());
    e.tiles = e.m_tiles * groups;
    e.us = double(problem.batch * slot_rows * groups) / config.tile_m() / multiprocessors *
           us(double(config.tile_m()) / config.tile_n);
    return e;
  }
  constexpr int64_t kLong = 16384;  // of a length that is not known
  const int64_t seq_q = problem.sequences_q.bounded ? problem.seq_q : kLong,
                seq_k = problem.sequences_k.bounded ? problem.seq_k : kLong;
  const int64_t tile_queries = int64_t{config.warpgroups} * pack.queries;
  e.m_tiles = tiles_of(seq_q, tile_queries);
  e.tiles = e.m_tiles * groups * problem.batch;

  // Each multiprocessor runs one tile at a time. Tiles of equal length go round by round; the
  // others fill the multiprocessors evenly, but none is done before the longest one.
  const KeyTiles keys = count_key_tiles(Mask::make(seq_q, seq_k, problem.mask_rule), seq_q, seq_k,
                                        config, tile_queries, e.m_tiles);
  const double rounds = double(e.tiles) / multiprocessors;
  e.us = problem.is_ragged()           ? rounds * us(keys.mean)
         : config.band || config.lists ? std::max(rounds * us(keys.mean), us(double(keys.most)))
                                       : std::ceil(rounds) * us(keys.mean);
  return e;
}

int most_key_splits(int64_t tiles) {
  // Of 16384 keys at head dim 128; what a split adds to its keys, and what a tile takes for each
  // split to be merged.
  constexpr int64_t kBlocks = 132, kEnough = 128;
  constexpr double kKeysUs = 211, kSplitUs = 5, kMergeUs = 0.8;
  if (tiles >= kEnough) return 1;
  const auto us = [&](int splits) {
    const auto rounds = double(ceil_div(tiles * splits, kBlocks));
    return splits == 1 ? kKeysUs + kSplitUs
                       : rounds * (kKeysUs / splits + kSplitUs) + splits * kMergeUs;
  };
  int best = 1;
  for (int splits = 2; splits <= kMostKeySplits; ++splits)
    if (us(splits) < us(best)) best = splits;
  return best;
}

bool is_better(const Estimate& other, const Estimate& best, double margin) {
  return other.us < (1 - margin) * best.us ||
         (other.us <= best.us && 2 * other.tiles <= best.tiles);
}

}  // namespace flash3::cuda::sm90
