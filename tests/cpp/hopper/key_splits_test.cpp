// SPDX-License-Identifier: Apache-2.0
// Where the keys of a work tile are split, and the ring of slots in which the splits lie, emulated.
// Needs no GPU.
#include "cuda/device/key_splits.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cuda/sm90/forward/estimate.hpp"

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

}  // namespace
}  // namespace flash3::cuda::sm90
