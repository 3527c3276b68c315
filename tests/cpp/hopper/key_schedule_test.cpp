// SPDX-License-Identifier: Apache-2.0
// Where the keys of a work tile are split, and the ring of slots in which the splits lie, emulated.
// Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "core/message.hpp"
#include "cuda/device/key_splits.hpp"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/forward/estimate.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

// As many splits as fill the 132 multiprocessors of an H100 or H200 in whole rounds, and no more
// than are merged in no time.
TEST(KeyParts, FillAGpuWhereTilesDoNot) {
  EXPECT_EQ(most_key_splits(32), 4);
  EXPECT_EQ(most_key_splits(64), 2);
  EXPECT_EQ(most_key_splits(66), 2);
  EXPECT_EQ(most_key_splits(1), 16);
  EXPECT_EQ(most_key_splits(8), 16);
  EXPECT_EQ(most_key_splits(16), 8);
  for (const int64_t tiles : {67, 80, 96, 100}) {  // a round and a half would take two
    const int64_t blocks = tiles * most_key_splits(tiles), rounds = (blocks + 131) / 132;
    EXPECT_GT(most_key_splits(tiles), 1) << tiles;
    EXPECT_GT(double(blocks), 0.8 * 132 * double(rounds)) << tiles;
  }
  for (const int64_t tiles : {126, 128, 132, 133, 200, 100000})
    EXPECT_EQ(most_key_splits(tiles), 1) << tiles;
}

// The splits of a work tile are all of its keys, each once, in order.
TEST(KeyParts, AreTheKeysOfTheTile) {
  std::mt19937_64 random(5);
  const auto below = [&](int n) { return int(random() % uint64_t(n)); };
  int split_tiles = 0, short_tiles = 0;
  for (int i = 0; i < 20000; ++i) {
    ListedSequence s{};
    s.q_length = 1 + below(700), s.k_length = below(i % 3 == 0 ? 100000 : 12000);
    TileMaskRule rule;
    if (i % 2 == 0) rule.window_right = below(2) * below(8000);
    if (i % 4 == 0) rule.window_left = below(15000);
    if (i % 7 == 0) rule.chunk = 1 + below(15000);
    const TileMask mask = TileMask::make(s.q_length, s.k_length, rule);
    const int tile_n = i % 2 == 0 ? 64 : 128, tile_queries = i % 5 == 0 ? 24 : 128;
    const int most = key_splits(s.k_length, 1 + below(kMostKeySplits));
    EXPECT_LE(most, std::max(1, s.k_length / kLeastSplitKeys));
    for (int m_tile = 0; m_tile * tile_queries < s.q_length; ++m_tile) {
      const WorkTile whole = work_tile(s, mask, tile_queries, m_tile, 0, tile_n, true);
      int next = whole.key_tile_begin, splits = 0;
      for (int p = 0; p < most; ++p) {
        WorkTile work = whole;
        KeySplit split{p, most, 0, 0};
        take_key_split(work, tile_n, split);
        if (!split.exists()) continue;
        ASSERT_EQ(p, splits) << "those that exist come first";
        ++splits;
        ASSERT_EQ(work.key_tile_begin, next);
        next = work.key_tile_end;
        if (split.count > 1) {
          ASSERT_GE((work.key_tile_end - work.key_tile_begin) * tile_n, kLeastSplitKeys);
        }
        EXPECT_EQ(work.query, whole.query);
        if (p == 0) {
          split_tiles += split.count > 1;
          short_tiles += split.count < most;
        } else {
          EXPECT_LE(work.hidden_keys(tile_n), 0) << "what no query sees lies in the first split";
        }
      }
      ASSERT_GE(splits, 1);
      ASSERT_EQ(next, whole.key_tile_end);
    }
  }
  EXPECT_GT(split_tiles, 1000);
  EXPECT_GT(short_tiles, 1000) << "windows leave some tiles fewer splits than the list has";
}

// A causal mask leaves the first tiles fewer keys, and they have as many splits as the last.
TEST(KeyParts, AllTilesOfAPromptHaveAsMany) {
  for (const int tile_n : {64, 128}) {
    ListedSequence s{};
    s.q_length = 512, s.k_length = 16384;
    TileMaskRule rule;
    rule.window_right = 0;
    const TileMask mask = TileMask::make(s.q_length, s.k_length, rule);
    for (int m_tile = 0; m_tile < 4; ++m_tile) {
      WorkTile work = work_tile(s, mask, 128, m_tile, 0, tile_n, true);
      KeySplit split{0, key_splits(s.k_length, 4), 0, 0};
      take_key_split(work, tile_n, split);
      EXPECT_EQ(split.count, 4) << m_tile;
    }
  }
  for (const int keys : {4096, 7167}) EXPECT_EQ(key_splits(keys, kMostKeySplits), 1);
}

// The ring of slots as the schedulers and consumers use it (forward/split.cuh), one step of one
// block at a time: no block writes where splits still lie, all blocks end, and all tiles are
// merged.
class Ring {
 public:
  Ring(int bits, int warpgroups, uint64_t seed)
      : bits_(bits), warpgroups_(warpgroups), random_(seed) {
    freed_.resize(size_t(1) << bits), arrived_.resize(freed_.size()), holder_.resize(freed_.size());
  }

  // tiles: how many splits the list has for each, and how many exist.
  void run(const std::vector<std::pair<int, int>>& tiles, int blocks, bool counted) {
    for (const auto& [most, count] : tiles)
      for (int p = 0; p < most; ++p) splits_.push_back({p, count, most});
    int next = blocks;
    std::vector<Block> all;
    for (int b = 0; b < blocks; ++b) all.push_back({b, false, 0});
    int running = blocks;
    for (int64_t step = 0; running > 0; ++step) {
      ASSERT_LT(step, 20'000'000) << "stuck";
      Block& block = all[random_() % all.size()];
      if (block.split >= int(splits_.size())) {
        if (!block.ended) --running;
        block.ended = true;
        continue;
      }
      if (!block.holds) {
        if (!begin(block)) continue;
      } else {
        if (++block.worked < int(random_() % 7)) continue;
        for (int w = 0; w < warpgroups_; ++w) finish(block.split);
      }
      if (block.holds && block.worked == 0) continue;
      block.split = counted ? next++ : block.split + blocks;
      block.holds = false, block.worked = 0;
    }
    EXPECT_EQ(merged_, std::ssize(tiles) * warpgroups_);
  }

 private:
  struct Split {
    int index, count, most;
  };
  struct Block {
    int split;
    bool holds;
    int worked;
    bool ended = false;
  };

  int slot(int i) const { return i & ((1 << bits_) - 1); }
  bool is_free(int i) const { return freed_[size_t(slot(i))] >= (i >> bits_) * warpgroups_; }

  // False: it waits.
  bool begin(Block& block) {
    const int i = block.split;
    const Split& split = splits_[size_t(i)];
    if (!is_free(i) || !is_free(i - split.index)) return false;
    if (split.index >= split.count) {
      freed_[size_t(slot(i))] += warpgroups_;
      return true;
    }
    EXPECT_EQ(holder_[size_t(slot(i))], 0) << "split " << i << " overwrites another";
    holder_[size_t(slot(i))] = warpgroups_;
    block.holds = true;
    return true;
  }

  void finish(int i) {
    const Split& split = splits_[size_t(i)];
    const int first = i - split.index;
    if (++arrived_[size_t(slot(first))] % split.count != 0) return;
    ++merged_;
    for (int p = 0; p < split.count; ++p) {
      --holder_[size_t(slot(first + p))];
      ++freed_[size_t(slot(first + p))];
    }
    // Each warpgroup has a counter; here they share one, which is 0 when the last has merged.
    if (arrived_[size_t(slot(first))] == split.count * warpgroups_)
      arrived_[size_t(slot(first))] = 0;
  }

  int bits_, warpgroups_;
  std::mt19937_64 random_;
  std::vector<int> freed_, arrived_, holder_;
  std::vector<Split> splits_;
  int64_t merged_ = 0;
};

TEST(KeyParts, TheRingHoldsThem) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::pair<int, int>> tiles(40 + random() % 200);
    for (auto& [most, count] : tiles) {
      most = 1 + int(random() % kMostKeySplits);
      count = 1 + int(random() % uint64_t(most));
    }
    const int blocks = 1 + int(random() % 20);
    Ring(5, 1, seed).run(tiles, blocks, seed % 2 == 0);
    if (HasFatalFailure()) return;
  }
}

// Which work each block of a backward has, and in which order
// (cuda/sm90/backward/params.h). Needs no GPU.

KeyTile work_of(const BackwardProblem& problem, const BackwardPlan& plan, int block) {
  const BackwardConfig& c = plan.kernel->config;
  const KeySchedule schedule = key_schedule(problem, plan);
  return key_tile_at(schedule, schedule.one_length, schedule.kv_heads, c.tile_n, c.band, block);
}

const char* const kShapes[] = {
    "bf16/b1/q1/k1/h1/d64/full",
    "bf16/b2/q300/k500/h4x2/d128/full",
    "bf16/b2/q300/k500/h4x2/d128/causal",
    "bf16/b3/q500/k300/h6x3/d64/causal",  // rows that see nothing
    "fp16/b1/q777/k555/h2/d64/w40:7",
    "bf16/b1/q200/k2000/h3/d128/w10:10",  // keys that no query sees
    "bf16/b2/q1000/k1000/h2/d128/causal+w100:",
    "fp16/b1/q640/k640/h5x1/d128/w:9",
    "bf16/b2/q0/k200/h2/d128/causal",
    "bf16/b2/q300/k400/h4x2/d128/causal/chunk150",
    "fp16/b1/q500/k500/h2/d64/full/chunk70",
    "bf16/b1/q400/k300/h2/d256/w30:5/chunk64",  // chunks of queries without keys
    "bf16/b1/q300/k300/h1/d64/w62:",            // a pair short of a whole step
    "bf16/b1/q300/k300/h1/d64/w:62",
};

TEST(KeyTiles, CoverEveryKeyTileOfEveryHeadOnce) {
  for (const char* id : kShapes) {
    const BackwardProblem problem = backward_problem_of(id);
    const PlannedBackward plan = plan_of(problem);
    const int tile_n = plan.kernel->config.tile_n;
    std::set<std::tuple<int, int, int>> seen;
    for (int block = 0; block < plan.key_tiles; ++block) {
      const KeyTile work = work_of(problem, plan, block);
      EXPECT_TRUE(seen.insert({work.sequence.batch, work.kv_head, work.key}).second) << id;
      EXPECT_TRUE(work.sequence.batch >= 0 && work.sequence.batch < problem.batch) << id;
      EXPECT_TRUE(work.kv_head >= 0 && work.kv_head < problem.heads_k) << id;
      EXPECT_TRUE(work.key >= 0 && work.key < problem.seq_k && work.key % tile_n == 0) << id;
    }
    EXPECT_EQ(std::ssize(seen), problem.batch * problem.heads_k * ceil_div(problem.seq_k, tile_n))
        << id;
  }
}

// Pair by pair: exactly the tiles from the first to the last query that sees one of the keys.
TEST(KeyTiles, HaveTheQueryTilesThatTheMaskLeaves) {
  for (const char* id : kShapes) {
    const BackwardProblem problem = backward_problem_of(id);
    const PlannedBackward plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    for (int block = 0; block < plan.key_tiles; ++block) {
      const KeyTile work = work_of(problem, plan, block);
      const int64_t end = std::min<int64_t>(work.key + c.tile_n, problem.seq_k);
      int64_t first = problem.seq_q, last = -1;
      for (int64_t i = 0; i < problem.seq_q; ++i)
        for (int64_t j = work.key; j < end; ++j)
          if (problem.mask().sees(i, j)) first = std::min(first, i), last = i;
      if (last < 0) {
        EXPECT_GE(work.query_tile_begin, work.query_tile_end) << id << ", key " << work.key;
      } else {
        EXPECT_EQ(work.query_tile_begin, first / c.tile_m) << id << ", key " << work.key;
        EXPECT_EQ(work.query_tile_end, last / c.tile_m + 1) << id << ", key " << work.key;
      }
    }
  }
}

// A tile goes without a mask if and only if it has no hidden pair.
TEST(KeyTiles, MaskTheQueryTilesThatTheMaskCutsAlone) {
  for (const char* id : kShapes) {
    const BackwardProblem problem = backward_problem_of(id);
    const PlannedBackward plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    if (!c.band) continue;
    const Mask mask = problem.mask();
    for (int block = 0; block < plan.key_tiles; ++block) {
      const KeyTile work = work_of(problem, plan, block);
      for (int key = work.key; key < work.key + c.tile_n; key += 64) {
        const WholeTiles whole = whole_tiles(work, {key, key + 64}, c.tile_m);
        for (int tile = work.query_tile_begin; tile < work.query_tile_end; ++tile) {
          const int query = tile * c.tile_m;
          bool all = key + 64 <= problem.seq_k;
          for (int i = query; i < query + c.tile_m; ++i)
            for (int j = key; j < key + 64; ++j) all = all && mask.sees(i, j);
          EXPECT_EQ(whole.hold(query), all) << id << ", key " << key << ", query " << query;
        }
      }
    }
  }
}

// Without a mask the tiles of a head follow one another; under a causal one no block of the heads
// that run together is longer than the one before.
TEST(KeyTiles, ComeInAnOrderThatSharesQueriesAndEndsWithTheShortest) {
  const BackwardProblem full = backward_problem_of("bf16/b2/q1000/k1000/h6/d128/full");
  const PlannedBackward plan = plan_of(full);
  for (int block = 0; block < plan.key_tiles; ++block) {
    const KeyTile work = work_of(full, plan, block);
    EXPECT_EQ(work.sequence.batch * 6 + work.kv_head, block / plan.n_tiles);
  }

  for (const char* id :
       {"bf16/b2/q1000/k1000/h6x2/d128/causal", "bf16/b1/q16384/k16384/h16/d128/causal"}) {
    const BackwardProblem causal = backward_problem_of(id);
    const BackwardPlan band = plan_of(causal);
    const auto length = [&](int block) {
      const KeyTile work = work_of(causal, band, block);
      return work.query_tile_end - work.query_tile_begin;
    };
    const int together = band.kv_heads_at_a_time * band.n_tiles;
    for (int block = 1; block < band.key_tiles; ++block)
      if (block % together != 0) {
        EXPECT_LE(length(block), length(block - 1)) << id << ", " << block;
      }
    EXPECT_GT(length(0), length(band.key_tiles - 1)) << id;
  }
}

// Q, dOut and the sums of dQ of the heads that run together: as many as fit 16 MiB, one at least.
TEST(KeyTiles, RunAsManyHeadsAsTheL2CacheHolds) {
  const auto heads = [](const std::string& rest) {
    return plan_of("bf16/" + rest).kv_heads_at_a_time;
  };
  EXPECT_EQ(heads("b2/q512/k512/h8/d128/causal"), 16) << "all of them";
  EXPECT_EQ(heads("b1/q4096/k4096/h16/d128/causal"), 4) << "4 MiB each";
  EXPECT_EQ(heads("b1/q4096/k4096/h16x4/d128/causal"), 1) << "16 MiB for the queries of each";
  EXPECT_EQ(heads("b1/q65536/k65536/h16/d128/causal"), 1);
  EXPECT_EQ(heads("b1/q512/k512/h8/d128/full"), 1) << "one after the other";
}

// Walks the blocks of a deterministic call on so many multiprocessors: they begin in order as room
// is made, and a block adds to its next query tile when the blocks before it have (one query head a
// KV head). Returns the steps until all are done.
int64_t walk_in_order(const BackwardProblem& problem, const BackwardPlan& plan,
                      int multiprocessors) {
  const BackwardConfig& c = plan.kernel->config;
  const KeySchedule schedule = key_schedule(problem, plan);
  struct Block {
    KeyTile work;
    int tile, left;  // query tile, and how many from it on
  };
  std::vector<Block> running;
  std::map<std::pair<int, int>, int> added;  // of (KV head, query tile)
  int next = 0;
  int64_t steps = 0;
  while (next < plan.key_tiles || !running.empty()) {
    for (; next < plan.key_tiles && std::ssize(running) < multiprocessors; ++next) {
      const KeyTile work = work_of(problem, plan, next);
      running.push_back({work, work.query_tile_begin, work.query_tiles()});
    }
    // What a block adds is seen by the others in the next step.
    const auto before = added;
    bool moved = std::erase_if(running, [](const Block& b) { return b.left == 0; }) > 0;
    for (Block& b : running) {
      const std::pair at(int(b.work.sequence.batch * problem.heads_k) + b.work.kv_head, b.tile);
      const auto found = before.find(at);
      const int order = dq_order(schedule, b.work, c.tile_n, c.band, b.tile);
      if (order != (found == before.end() ? 0 : found->second)) continue;
      ++added[at];
      b.tile = b.work.next(b.tile);
      --b.left;
      moved = true;
    }
    if (!moved) {
      ADD_FAILURE() << "all wait, on " << multiprocessors << " multiprocessors";
      return -1;
    }
    ++steps;
  }
  return steps;
}

TEST(DeterministicSums, GiveEveryBlockItsTurn) {
  std::vector<std::string> shapes(std::begin(kShapes), std::end(kShapes));
  // More key tiles than multiprocessors, more than query tiles, and fewer.
  shapes.insert(
      shapes.end(),
      {"bf16/b1/q2048/k20000/h2/d64/full", "bf16/b1/q9000/k700/h8x2/d128/full",
       "bf16/b2/q5000/k20000/h2/d128/causal", "bf16/b1/q9000/k20000/h1/d256/w:100",
       "bf16/b1/q20000/k20000/h1/d128/w100:", "bf16/b1/q20000/k20000/h2/d128/causal/chunk1000",
       "bf16/b1/q9000/k20000/h1/d64/full/chunk3000"});
  for (const std::string& shape : shapes) {
    const BackwardProblem problem = backward_problem_of(shape + "/deterministic");
    const PlannedBackward plan = plan_of(problem);
    EXPECT_TRUE(plan.deterministic);
    SCOPED_TRACE(shape);
    // Whatever other calls leave of the GPU.
    for (const int multiprocessors : {1, 7, kDevice.multiprocessors})
      walk_in_order(problem, plan, multiprocessors);
  }
}

// In multiples of what the blocks would take if none ever waited.
TEST(DeterministicSums, LetBlocksWaitLittleWhereQueriesAreAsManyAsKeys) {
  for (const auto& [id, allowed] : {std::pair{"bf16/b1/q16384/k16384/h4/d128/full", 1.2},
                                    std::pair{"bf16/b1/q16384/k16384/h4/d128/causal", 1.35},
                                    std::pair{"bf16/b8/q2048/k2048/h4/d64/full", 1.35},
                                    std::pair{"bf16/b1/q8192/k8192/h16/d256/causal+w500:", 1.35}}) {
    const BackwardProblem problem = backward_problem_of(std::string(id) + "/deterministic");
    const PlannedBackward plan = plan_of(problem);
    int64_t tiles = 0;
    for (int block = 0; block < plan.key_tiles; ++block)
      tiles += work_of(problem, plan, block).query_tiles();
    const int blocks = std::min(plan.key_tiles, kDevice.multiprocessors);
    const int64_t steps = walk_in_order(problem, plan, kDevice.multiprocessors);
    EXPECT_LE(double(steps) * blocks, allowed * double(tiles)) << id;
  }
}

}  // namespace
}  // namespace flash3::cuda::sm90
