// SPDX-License-Identifier: Apache-2.0
// The mask with chunks, and its tile ranges, against brute force over the definition in flash3.h;
// and without chunks against the band.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "core/mask_rule.hpp"

namespace flash3 {
namespace {

Index floor_div(Index a, Index b) { return a >= 0 ? a / b : (a - b + 1) / b; }

// i' − window_left ≤ j ≤ i' + window_right and floor(j / chunk) = floor(i' / chunk), with i' = i +
// seq_k − seq_q, or i.
bool defined_to_see(Index i, Index j, Index seq_q, Index seq_k, const MaskRule& rule) {
  const Index aligned = rule.top_left ? i : i + seq_k - seq_q;
  return (rule.window_left < 0 || aligned - rule.window_left <= j) &&
         (rule.window_right < 0 || j <= aligned + rule.window_right) &&
         (rule.chunk == 0 || floor_div(j, rule.chunk) == floor_div(aligned, rule.chunk));
}

struct Sample {
  Index seq_q, seq_k;
  MaskRule rule;
  Index tile_m, tile_n;
};

class MaskProperty : public testing::Test {
 protected:
  Sample draw() {
    const auto pick = [&](Index low, Index high) {
      return std::uniform_int_distribution<Index>(low, high)(random_);
    };
    return {pick(1, 40),
            pick(0, 40),
            {pick(-2, 45), pick(-2, 45), pick(0, 2) * pick(1, 21), pick(0, 3) == 0},
            pick(1, 12),
            pick(1, 12)};
  }

  std::mt19937 random_{20261122};
};

TEST_F(MaskProperty, SeesWhatTheHeaderDefines) {
  for (int n = 0; n < 4000; ++n) {
    const Sample s = draw();
    const Mask mask = Mask::make(s.seq_q, s.seq_k, s.rule), transposed = mask.transposed();
    bool all = true;
    for (Index i = 0; i < s.seq_q; ++i)
      for (Index j = 0; j < s.seq_k; ++j) {
        const bool expected = defined_to_see(i, j, s.seq_q, s.seq_k, s.rule);
        all &= expected;
        ASSERT_EQ(mask.sees(i, j), expected) << i << " " << j << " chunk " << s.rule.chunk;
        ASSERT_EQ(transposed.sees(j, i), expected) << i << " " << j << " chunk " << s.rule.chunk;
      }
    if (s.seq_k > 0) {
      ASSERT_EQ(mask.is_full(s.seq_q, s.seq_k), all);
    }
  }
}

// Checks `mask` over rows × columns, in tiles.
void expect_exact_ranges(const Mask& mask, Index row_count, Index columns, Index tile_m,
                         Index tile_n) {
  for (Index begin = 0; begin < row_count; begin += tile_m) {
    const Range rows{begin, std::min(begin + tile_m, row_count)};
    const Range seen = mask.keys(rows, columns);
    for (Index j = 0; j < columns; ++j) {
      bool any = false;
      for (Index i = rows.begin; i < rows.end; ++i) any |= mask.sees(i, j);
      ASSERT_EQ(seen.begin <= j && j < seen.end, any) << "column " << j;
    }
    const Range tiles = mask.key_tiles(rows, columns, tile_n);
    const Range full = mask.full_tiles(rows, columns, tile_n);
    const Index tile_count = ceil_div(columns, tile_n);
    ASSERT_GE(tiles.begin, 0);
    ASSERT_LE(tiles.end, tile_count);
    for (Index t = 0; t < tile_count; ++t) {
      const Range tile{t * tile_n, std::min((t + 1) * tile_n, columns)};
      bool any = false, all = true;
      for (Index j = tile.begin; j < tile.end; ++j)
        for (Index i = rows.begin; i < rows.end; ++i) {
          any |= mask.sees(i, j);
          all &= mask.sees(i, j);
        }
      ASSERT_EQ(tiles.begin <= t && t < tiles.end, any) << "tile " << t;
      ASSERT_EQ(mask.covers(rows, tile), all) << "tile " << t;
      const bool whole = tile.size() == tile_n;  // a ragged last tile is masked at its end
      ASSERT_EQ(full.begin <= t && t < full.end, all && whole) << "tile " << t;
    }
  }
}

// A kernel's rule has other bounds than the caller's where there is none.
TEST_F(MaskProperty, KernelsSeeTheSame) {
  using Narrow = MaskOf<int>;
  constexpr int kLongest = BandOf<int>::kUnbounded;
  for (int n = 0; n < 4000; ++n) {
    const Sample s = draw();
    const int seq_q = int(s.seq_q), seq_k = int(s.seq_k);
    const auto mask = Narrow::make(seq_q, seq_k, s.rule.narrowed(kLongest)),
               transposed = mask.transposed();
    for (int i = 0; i < seq_q; ++i)
      for (int j = 0; j < seq_k; ++j) {
        const bool expected = defined_to_see(i, j, s.seq_q, s.seq_k, s.rule);
        ASSERT_EQ(mask.sees(i, j), expected) << i << " " << j << " chunk " << s.rule.chunk;
        ASSERT_EQ(transposed.sees(j, i), expected) << i << " " << j << " chunk " << s.rule.chunk;
      }
  }
}

// No sum of theirs and no distance from a column leaves 32 bits, and no bound that is none falls
// among the rows or columns of the longest sequences, or of the tiles that their last ones lie in.
TEST(Mask, KernelsBoundsOfTheLongestSequencesDoNotOverflow) {
  constexpr int kMax = BandOf<int>::kUnbounded - 256, kTile = 191;
  const auto check = [](int seq_q, int seq_k, const MaskRule& rule) {
    const auto mask = MaskOf<int>::make(seq_q, seq_k, rule.narrowed(BandOf<int>::kUnbounded));
    const Mask exact = Mask::make(seq_q, seq_k, rule);
    const auto same = [](const auto& narrow, const Mask& wide, int rows, int columns) {
      for (const int i : {0, rows / 2, rows - 1, rows + kTile}) {
        const auto in_tensor = [&](auto x) { return std::clamp<Index>(x, 0, columns + kTile); };
        EXPECT_EQ(in_tensor(narrow.first(i)), in_tensor(wide.first(i))) << i;
        EXPECT_EQ(in_tensor(narrow.end(i)), in_tensor(wide.end(i))) << i;
        EXPECT_GE(narrow.first(i) - Index(columns), std::numeric_limits<int>::min()) << i;
      }
    };
    same(mask, exact, seq_q, seq_k);
    same(mask.transposed(), exact.transposed(), seq_k, seq_q);
  };
  for (const bool top_left : {false, true})
    for (const Index left : {Index{-1}, Index{0}, Index{kMax - 1}, Index{1} << 31})
      for (const Index right : {Index{-1}, Index{0}, Index{kMax - 1}, Index{1} << 31})
        for (const auto& [seq_q, seq_k] : {std::pair{kMax, kMax}, {1, kMax}, {kMax, 1}, {7, 5}}) {
          SCOPED_TRACE(testing::Message()
                       << top_left << " " << left << " " << right << " " << seq_q << " " << seq_k);
          check(seq_q, seq_k, {left, right, 0, top_left});
        }
}

TEST_F(MaskProperty, KeysAndTilesAreExact) {
  for (int n = 0; n < 4000; ++n) {
    const Sample s = draw();
    const Mask mask = Mask::make(s.seq_q, s.seq_k, s.rule);
    expect_exact_ranges(mask, s.seq_q, s.seq_k, s.tile_m, s.tile_n);
    expect_exact_ranges(mask.transposed(), s.seq_k, s.seq_q, s.tile_m, s.tile_n);
    if (HasFatalFailure()) return;
  }
}

// A range of keys for each row, in any order: bounds that also decrease.
struct Ranges {
  std::vector<Range> of_row;

  Index first(Index i) const { return of_row[size_t(i)].begin; }
  Index end(Index i) const { return of_row[size_t(i)].end; }
  bool sees(Index i, Index j) const { return first(i) <= j && j < end(i); }
  ExtremesOf<Index> firsts(Range rows) const {
    return extremes(rows, [&](Index i) { return first(i); });
  }
  ExtremesOf<Index> ends(Range rows) const {
    return extremes(rows, [&](Index i) { return end(i); });
  }

 private:
  template <class Bound>
  static ExtremesOf<Index> extremes(Range rows, const Bound& bound) {
    ExtremesOf<Index> found{bound(rows.begin), bound(rows.begin)};
    for (Index i = rows.begin; i < rows.end; ++i)
      found = {std::min(found.least, bound(i)), std::max(found.most, bound(i))};
    return found;
  }
};
static_assert(RowBounds<Ranges, Index> && RowBounds<Mask, Index>);

// Whatever the order of the bounds, no visible key is left out and no hidden one counts as seen.
TEST_F(MaskProperty, TilesOfBoundsThatDecreaseHoldWhatRowsSee) {
  int decreasing = 0, full_tiles = 0, skipped_tiles = 0;
  for (int n = 0; n < 4000; ++n) {
    const Sample s = draw();
    Ranges mask;
    for (Index i = 0; i < s.seq_q; ++i) {
      const Index begin = Index(random_() % 20), size = Index(random_() % 40);
      mask.of_row.push_back({begin, begin + size});
      decreasing += i > 0 && begin < mask.first(i - 1);
    }
    const TilesOf<Index, Ranges> of{mask};
    for (Index begin = 0; begin < s.seq_q; begin += s.tile_m) {
      const Range rows{begin, std::min(begin + s.tile_m, s.seq_q)};
      const Range tiles = of.key_tiles(rows, s.seq_k, s.tile_n),
                  full = of.full_tiles(rows, s.seq_k, s.tile_n);
      for (Index t = 0; t < ceil_div(s.seq_k, s.tile_n); ++t) {
        const Range tile{t * s.tile_n, std::min((t + 1) * s.tile_n, s.seq_k)};
        bool any = false, all = true;
        for (Index j = tile.begin; j < tile.end; ++j)
          for (Index i = rows.begin; i < rows.end; ++i) {
            any |= mask.sees(i, j);
            all &= mask.sees(i, j);
          }
        const bool loaded = tiles.begin <= t && t < tiles.end;
        ASSERT_TRUE(loaded || !any) << "tile " << t;
        ASSERT_EQ(of.covers(rows, tile), all) << "tile " << t;
        ASSERT_EQ(full.begin <= t && t < full.end, all && tile.size() == s.tile_n) << "tile " << t;
        full_tiles += all;
        skipped_tiles += !loaded;
      }
    }
  }
  EXPECT_GT(decreasing, 1000);
  EXPECT_GT(full_tiles, 100);
  EXPECT_GT(skipped_tiles, 100);
}

TEST(Mask, RangesOfTheLargestProblemDoNotOverflow) {
  constexpr Index kMax = std::numeric_limits<int>::max();
  for (const Index chunk : {Index{1}, Index{8192}, kMax})
    for (const auto& [seq_q, seq_k] : {std::pair{kMax, kMax}, {Index{1}, kMax}, {kMax, Index{1}}}) {
      const Mask mask = Mask::make(seq_q, seq_k, {-1, 0, chunk});
      const Range last = mask.keys({seq_q - 1, seq_q}, seq_k);
      EXPECT_EQ(last.begin, (seq_k - 1) / chunk * chunk);
      EXPECT_EQ(last.end, seq_k);
      EXPECT_EQ(mask.keys({0, 1}, seq_k).empty(), seq_q > seq_k);
    }
}

// As kernels have it: a rule in 32 bits, of lengths below 100.
constexpr auto kNarrow = MaskRule{1 << 20, 3, 1 << 20, true}.narrowed(100);
static_assert(kNarrow.window_left == BandOf<int>::kUnbounded && kNarrow.window_right == 3 &&
              kNarrow.chunk == 100);
static_assert(MaskOf<int>::make(10, 4, kNarrow).sees(0, 3) && kNarrow.shift(10, 4) == 0);

// Usable in constant expressions, as device code needs.
static_assert(Mask::make(8, 8, {-1, 0, 4}).sees(5, 4) && !Mask::make(8, 8, {-1, 0, 4}).sees(5, 3));

// Masks without chunks, which are bands, and their tile ranges against brute force over the
// definition in flash3.h.

// i' − window_left ≤ j ≤ i' + window_right with i' = i + seq_k − seq_q; negative: unbounded.
bool defined_to_see(Index i, Index j, Index seq_q, Index seq_k, Index left, Index right) {
  const Index aligned = i + seq_k - seq_q;
  return (left < 0 || aligned - left <= j) && (right < 0 || j <= aligned + right);
}

struct BandSample {
  Index seq_q, seq_k, left, right, tile_m, tile_n;
};

class BandProperty : public testing::Test {
 protected:
  BandSample draw() {
    const auto pick = [&](Index low, Index high) {
      return std::uniform_int_distribution<Index>(low, high)(random_);
    };
    return {pick(1, 40), pick(0, 40), pick(-2, 45), pick(-2, 45), pick(1, 12), pick(1, 12)};
  }

  std::mt19937 random_{20240711};
};

TEST_F(BandProperty, SeesWhatTheHeaderDefines) {
  for (int n = 0; n < 2000; ++n) {
    const BandSample s = draw();
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
    const BandSample s = draw();
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
