// SPDX-License-Identifier: Apache-2.0
// The integers of the score stage: which row and key an element is of, and what rows see. Needs no
// GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cuda/device/score/key_bits.hpp"
#include "cuda/device/score/partial.hpp"
#include "cuda/device/score/transposed_views.hpp"
#include "cuda/device/score/view.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda {
namespace {

// Line and column, of a 64-line accumulator, of element i of a thread (PTX ISA, wgmma: D fragment).
std::pair<int, int> accumulator_place(int thread, int i) {
  return {thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2};
}

// Which element of scores at(…, r, k) is.
template <class View>
int element_of(int r, int k) {
  typename View::Scores scores{};
  View::at(scores, r, k) = 1.f;
  const float* const flat = reinterpret_cast<const float*>(&scores);
  int found = -1;
  for (int i = 0; i < int(sizeof(scores) / sizeof(float)); ++i)
    if (flat[i] != 0.f) found = i;
  return found;
}

template <class View>
void expect_each_element_once() {
  std::set<int> elements;
  for (int r = 0; r < View::kRows; ++r)
    for (int k = 0; k < View::kKeys; ++k) elements.insert(element_of<View>(r, k));
  EXPECT_EQ(elements.size(), sizeof(typename View::Scores) / sizeof(float));
  EXPECT_EQ(*elements.begin(), 0);
}

TEST(ScoreView, OfQueriesByKeysIsTheAccumulator) {
  using View = QueriesByKeys<64>;
  static_assert(ScoreView<View>);
  expect_each_element_once<View>();
  for (int thread = 0; thread < 128; ++thread) {
    const auto [row, key] = accumulator_place(thread, 0);
    const View view{row, 1000 + key};
    for (int r = 0; r < View::kRows; ++r)
      for (int k = 0; k < View::kKeys; ++k) {
        const int i = element_of<View>(r, k);
        const auto place = accumulator_place(thread, i);
        EXPECT_EQ(std::pair(view.row(r), view.key(k) - 1000), place);
        EXPECT_EQ(View::row_of(i), r);
        EXPECT_EQ(View::key_of(i), k);
      }
  }
}

TEST(ScoreView, OfKeyBlocksIsTheTransposedAccumulatorOfEachBlock) {
  using View = KeyBlocks<2, 16>;
  static_assert(ScoreView<View>);
  expect_each_element_once<View>();
  for (int thread = 0; thread < 128; ++thread) {
    const auto [key, row] = accumulator_place(thread, 0);
    const View view{row, 1000 + key};
    for (int r = 0; r < View::kRows; ++r)
      for (int k = 0; k < View::kKeys; ++k) {
        const int i = element_of<View>(r, k), block = i / 16;
        const auto [line, column] = accumulator_place(thread, i % 16);
        EXPECT_EQ(view.row(r), column);
        EXPECT_EQ(view.key(k) - 1000, 64 * block + line);
        EXPECT_EQ(KeysByQueries<16>::row_of(i % 16), r);
        EXPECT_EQ(KeysByQueries<16>::key_of(i % 16), k % 2);
      }
  }
}

// Both ways to ask a word say what its bits do.
TEST(TreeMask, WordsHideTheKeysWhoseBitsTheyLack) {
  std::mt19937_64 random(7);
  int hidden_keys = 0;
  for (int n = 0; n < 2000; ++n) {
    const unsigned long long word = random();
    const KeyBits shown{unsigned(word), unsigned(word >> 32)};
    const int first_bit = int(random() % 300), first_key = int(random() % 400);
    const unsigned long long hidden = hidden_from(shown, first_bit, first_key);
    for (int offset = 0; offset < 64; ++offset) {
      const int key = first_key + offset, bit = key - first_bit;
      const bool expected = bit >= 0 && bit < 64 && (word >> bit & 1) == 0;
      const KeyBits asked = bits_of_key(key, first_bit);
      EXPECT_EQ((hidden >> offset & 1) != 0, expected) << key << " of " << first_bit;
      EXPECT_EQ(((asked.low & ~shown.low) | (asked.high & ~shown.high)) != 0, expected);
      hidden_keys += expected;
    }
  }
  EXPECT_GT(hidden_keys, 1000);
}

TEST(RowKeys, EndWithTheSequence) {
  const TileMask mask =
      TileMask::make(10, 20, TileMaskRule{.window_right = 0});  // causal, to the bottom right
  for (int row = 0; row < 10; ++row) {
    EXPECT_EQ(keys_of_row<true>(mask, 20, row).end, row + 11);
    EXPECT_EQ(keys_of_row<true>(mask, 15, row).end, std::min(row + 11, 15));
    EXPECT_EQ(keys_of_row<false>(mask, 20, row).end, 20);
  }
}

const auto kExp2 = [](float x) { return std::exp2(x); };
using Row = Partial<1>;

// slack: by how much a lazy maximum may lie below the largest score.
Row partial_of(const std::vector<float>& scores, const std::vector<float>& values, size_t begin,
               size_t end, float slack) {
  Row p;
  for (size_t j = begin; j < end; ++j) p.max = std::max(p.max, scores[j] - slack);
  for (size_t j = begin; j < end; ++j) {
    const float weight = std::exp2(scores[j] - merge_origin(p.max));
    p.sum += weight, p.out[0] += weight * values[j];
  }
  return p;
}

// Wherever the keys are parted, and whatever each part counts from.
TEST(Partial, MergedAreOfAllKeys) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> score(0.f, 20.f), value(0.f, 1.f);
  for (int n = 0; n < 500; ++n) {
    const size_t keys = 1 + random() % 40;
    std::vector<float> scores(keys), values(keys);
    for (float& s : scores) s = random() % 5 == 0 ? -INFINITY : score(random);
    for (float& v : values) v = value(random);
    const Row all = partial_of(scores, values, 0, keys, 0.f);
    Row merged;
    for (size_t begin = 0; begin < keys;) {
      const size_t end = std::min(keys, begin + 1 + random() % 9);
      merged.merge(partial_of(scores, values, begin, end, float(random() % 9)), kExp2);
      begin = end;
    }
    const float scale = std::exp2(merged.max - all.max);  // of weights
    if (all.sum == 0.f) {
      EXPECT_EQ(merged.max, -INFINITY);
      EXPECT_EQ(merged.sum, 0.f);
      EXPECT_EQ(merged.out[0], 0.f);
      continue;
    }
    EXPECT_NEAR(merged.sum * scale, all.sum, 1e-5f * all.sum);
    EXPECT_NEAR(merged.out[0] * scale, all.out[0], 1e-5f * all.sum * 4);
  }
}

TEST(Partial, WithoutAKeyChangesNothing) {
  for (const bool first : {false, true}) {
    const Row some{{-0.7f}, 3.f, 1.5f};
    Row merged = first ? Row{} : some;
    merged.merge(first ? some : Row{}, kExp2);
    EXPECT_EQ(merged.max, some.max);
    EXPECT_EQ(merged.sum, some.sum);
    EXPECT_EQ(merged.out[0], some.out[0]);
  }
  Row none;
  none.merge(Row{}, kExp2);
  EXPECT_EQ(none.max, -INFINITY);
  EXPECT_EQ(none.sum, 0.f);
}

}  // namespace
}  // namespace flash3::cuda
