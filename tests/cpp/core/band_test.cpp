// SPDX-License-Identifier: Apache-2.0
// Masks without chunks, which are bands, and their tile ranges against brute force over the
// definition in flash3.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "core/mask_rule.hpp"

namespace flash3 {
namespace {

// i' − window_left ≤ j ≤ i' + window_right with i' = i + seq_k − seq_q; negative: unbounded.
bool defined_to_see(Index i, Index j, Index seq_q, Index seq_k, Index left, Index right) {
  const Index aligned = i + seq_k - seq_q;
  return (left < 0 || aligned - left <= j) && (right < 0 || j <= aligned + right);
}

struct Sample {
  Index seq_q, seq_k, left, right, tile_m, tile_n;
};

class BandProperty : public testing::Test {
 protected:
  Sample draw() {
    const auto pick = [&](Index low, Index high) {
      return std::uniform_int_distribution<Index>(low, high)(random_);
    };
    return {pick(1, 40), pick(0, 40), pick(-2, 45), pick(-2, 45), pick(1, 12), pick(1, 12)};
  }

  std::mt19937 random_{20240711};
};

TEST_F(BandProperty, SeesWhatTheHeaderDefines) {
  for (int n = 0; n < 2000; ++n) {
    const Sample s = draw();
    const Mask band = Mask::make(s.seq_q, s.seq_k, {s.left, s.right});
    bool all = true;
    for (Index i = 0; i < s.seq_q; ++i)
      for (Index j = 0; j < s.seq_k; ++j) {
        const bool expected = defined_to_see(i, j, s.seq_q, s.seq_k, s.left, s.right);
        all &= expected;
        ASSERT_EQ(band.sees(i, j), expected) << i << " " << j;
      }
    if (s.seq_k > 0) {
      ASSERT_EQ(band.is_full(s.seq_q, s.seq_k), all);
    }
  }
}

TEST_F(BandProperty, KeysAndTilesAreExact) {
  for (int n = 0; n < 2000; ++n) {
    const Sample s = draw();
    const Mask band = Mask::make(s.seq_q, s.seq_k, {s.left, s.right});
    for (Index begin = 0; begin < s.seq_q; begin += s.tile_m) {
      const Range rows{begin, std::min(begin + s.tile_m, s.seq_q)};
      const auto seen = [&](Index j) {
        for (Index i = rows.begin; i < rows.end; ++i)
          if (band.sees(i, j)) return true;
        return false;
      };
      const Range keys = band.keys(rows, s.seq_k);
      for (Index j = 0; j < s.seq_k; ++j)
        ASSERT_EQ(keys.begin <= j && j < keys.end, seen(j)) << "key " << j;

      const Range tiles = band.key_tiles(rows, s.seq_k, s.tile_n);
      const Range full = band.full_tiles(rows, s.seq_k, s.tile_n);
      const Index tile_count = (s.seq_k + s.tile_n - 1) / s.tile_n;
      ASSERT_GE(tiles.begin, 0);
      ASSERT_LE(tiles.end, tile_count);
      for (Index t = 0; t < tile_count; ++t) {
        const Range tile{t * s.tile_n, std::min((t + 1) * s.tile_n, s.seq_k)};
        bool any = false, all = true;
        for (Index j = tile.begin; j < tile.end; ++j)
          for (Index i = rows.begin; i < rows.end; ++i) {
            any |= band.sees(i, j);
            all &= band.sees(i, j);
          }
        ASSERT_EQ(tiles.begin <= t && t < tiles.end, any) << "tile " << t;
        ASSERT_EQ(band.covers(rows, tile), all) << "tile " << t;
        const bool whole = tile.size() == s.tile_n;  // a ragged last tile is masked at seq_k
        ASSERT_EQ(full.begin <= t && t < full.end, all && whole) << "tile " << t;
      }
    }
  }
}

TEST(Band, RangesOfTheLargestProblemDoNotOverflow) {
  constexpr Index kMax = std::numeric_limits<int>::max();
  constexpr Index kHuge = std::numeric_limits<Index>::max();
  for (const Index left : {Index{-1}, Index{0}, kMax, kHuge})
    for (const Index right : {Index{-1}, Index{0}, kMax, kHuge}) {
      const Mask band = Mask::make(kMax, kMax, {left, right});
      const Range last = band.keys({kMax - 1, kMax}, kMax);
      EXPECT_EQ(last.begin, left == 0 ? kMax - 1 : 0);
      EXPECT_EQ(last.end, kMax);
      const Range first = band.key_tiles({0, 1}, kMax, 128);
      EXPECT_EQ(first.begin, 0);
      EXPECT_EQ(first.end, right == 0 ? 1 : (kMax + 127) / 128);
      EXPECT_EQ(band.is_full(kMax, kMax), left != 0 && right != 0);
    }
}

TEST(Band, RowsBeforeTheFirstKeyAndBehindTheLastSeeNothing) {
  const Mask causal = Mask::make(10, 4, {-1, 0});  // the first 6 queries lie before every key
  EXPECT_TRUE(causal.keys({0, 6}, 4).empty());
  EXPECT_EQ(causal.keys({0, 6}, 4).size(), 0);
  EXPECT_TRUE(causal.key_tiles({0, 6}, 4, 2).empty());
  EXPECT_EQ(causal.keys({0, 7}, 4).size(), 1);
  const Mask late{.band = {.lo = 5, .hi = 9}};
  EXPECT_TRUE(late.keys({0, 2}, 4).empty());
  EXPECT_TRUE(late.key_tiles({0, 2}, 4, 8).empty());
  const Mask window = Mask::make(4, 0, {2, 2});  // no keys at all
  EXPECT_TRUE(window.keys({0, 4}, 0).empty());
  EXPECT_TRUE(window.key_tiles({0, 4}, 0, 64).empty());
}

// Usable in constant expressions, as the device code's tables need.
static_assert(Mask::make(4, 4, {-1, 0}).sees(2, 2) && !Mask::make(4, 4, {-1, 0}).sees(2, 3));
static_assert(Mask{}.is_full(1'000'000, 1'000'000));

}  // namespace
}  // namespace flash3
