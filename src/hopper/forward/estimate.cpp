#include "hopper/forward/estimate.hpp"

#include <algorithm>
#include <cmath>

namespace flash3::hopper {
namespace {

// Key tiles that one query tile works on, over all query tiles of a head.
struct KeyTiles {
  double mean = 0;
  int64_t most = 0;
};

KeyTiles count_key_tiles(const ForwardProblem& problem, const ForwardConfig& config,
                         int64_t tile_queries, int64_t m_tiles) {
  // Enough for a sum of a few straight pieces, and cheap enough for every call.
  constexpr int64_t kMaxSamples = 16;
  const int64_t samples = std::min(m_tiles, config.band ? kMaxSamples : 1);
  const double step = samples > 1 ? double(m_tiles - 1) / double(samples - 1) : 0;
  int64_t sum = 0, most = 0;
  for (int64_t i = 0; i < samples; ++i) {
    const auto m_tile = int64_t(double(i) * step + 0.5);  // the first and the last are among them
    const Range queries = {m_tile * tile_queries,
                           std::min((m_tile + 1) * tile_queries, problem.seq_q)};
    const int64_t count = problem.band().key_tiles(queries, problem.seq_k, config.tile_n).size();
    sum += count;
    most = std::max(most, count);
  }
  return {samples > 0 ? double(sum) / double(samples) : 0, most};
}

}  // namespace

Estimate estimate_forward(const ForwardProblem& problem, const ForwardConfig& config,
                          const HeadPack& pack, int multiprocessors) {
  const int64_t tile_queries = int64_t{config.warpgroups} * pack.queries;
  Estimate e;
  e.m_tiles = (problem.seq_q + tile_queries - 1) / tile_queries;
  e.tiles = e.m_tiles * (problem.heads_q / pack.heads) * problem.batch;

  // Each multiprocessor runs one tile at a time. Tiles of equal length go round by round; the
  // others fill the multiprocessors evenly, but none is done before the longest one.
  const KeyTiles keys = count_key_tiles(problem, config, tile_queries, e.m_tiles);
  const auto us = [&](double key_tiles) { return config.tile_us + key_tiles * config.key_tile_us; };
  const double rounds = double(e.tiles) / multiprocessors;
  e.us = config.band ? std::max(rounds * us(keys.mean), us(double(keys.most)))
                     : std::ceil(rounds) * us(keys.mean);
  return e;
}

bool is_better(const Estimate& other, const Estimate& best, double margin) {
  return other.us < (1 - margin) * best.us ||
         (other.us <= best.us && 2 * other.tiles <= best.tiles);
}

}  // namespace flash3::hopper
