#include "hopper/forward/estimate.hpp"

#include <algorithm>

namespace flash3::hopper {
namespace {

// Per work tile, what no key tile hides: the first loads, the last P·V, the store. H200, bf16,
// d 128 full: the difference between 512 and 16k keys.
constexpr double kTileOverheadCycles = 3000;

// One key tile: the tensor cores (2048 multiply-adds a cycle) and the exponentials (16 a cycle), of
// which the overlap hides a fifth of the sum. H200, 16k tokens: d 64 2460 cycles a key tile of
// 192 x 128, d 128 3440 of 128 x 176.
double key_tile_cycles(const ForwardConfig& config) {
  const double scores = double(config.tile_m()) * config.tile_n;
  const double products = scores * (config.head_dim + config.head_dim_v) / 2048;
  return 0.8 * (products + scores / 16);
}

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
    const int64_t count = problem.band.key_tiles(queries, problem.seq_k, config.tile_n).size();
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

  // Each multiprocessor runs one tile at a time: so many rounds of the mean tile, and never less
  // than the longest one.
  const KeyTiles keys = count_key_tiles(problem, config, tile_queries, e.m_tiles);
  const auto cycles = [&](double key_tiles) {
    return kTileOverheadCycles + key_tiles * key_tile_cycles(config);
  };
  const int64_t rounds = (e.tiles + multiprocessors - 1) / multiprocessors;
  e.cycles = std::max(double(rounds) * cycles(keys.mean), cycles(double(keys.most)));
  return e;
}

bool is_better(const Estimate& other, const Estimate& best) {
  return other.cycles < 0.95 * best.cycles ||
         (other.cycles <= best.cycles && 2 * other.tiles <= best.tiles);
}

}  // namespace flash3::hopper
