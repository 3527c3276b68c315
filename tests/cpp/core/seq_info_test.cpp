// SPDX-License-Identifier: Apache-2.0
// Rows of a sequence: what cu_seqlens and seqused say, and that nothing they could hold leads
// outside the tensor.
#include "core/seq_info.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace flash3 {
namespace {

void expect_rows(const RowRange& rows, Index first, Index length, Index capacity) {
  EXPECT_EQ(rows.first, first);
  EXPECT_EQ(rows.length, length);
  EXPECT_EQ(rows.capacity, capacity);
}

TEST(RowRange, OfEachLayout) {
  const int cu[] = {0, 3, 3, 10}, used[] = {2, 0, 7};
  Sequences s{.rows = 12, .max_length = 12};
  expect_rows(rows_of(s, 2), 0, 12, 12);
  s.used = used;  // padded
  expect_rows(rows_of(s, 0), 0, 2, 12);
  expect_rows(rows_of(s, 1), 0, 0, 12);
  s.cu = cu;  // packed
  expect_rows(rows_of(s, 0), 0, 2, 3);
  expect_rows(rows_of(s, 1), 3, 0, 0);
  expect_rows(rows_of(s, 2), 3, 7, 7);
  s.used = nullptr;
  expect_rows(rows_of(s, 0), 0, 3, 3);
  s.max_length = 5;  // what is longer than it was promised to be is cut
  expect_rows(rows_of(s, 2), 3, 5, 7);
}

TEST(RowRange, NeverLeaveTheTensor) {
  constexpr int kLow = std::numeric_limits<int>::min(), kHigh = std::numeric_limits<int>::max();
  std::mt19937 random(7);
  const std::vector<int> values = {kLow, -1, 0, 1, 2, 5, 8, 9, 10, 11, kHigh};
  const auto pick = [&] { return values[random() % values.size()]; };
  for (int n = 0; n < 20000; ++n) {
    const int cu[] = {pick(), pick()}, used[] = {pick()};
    const Index max = std::max(0, std::min(pick(), 9));
    const Sequences s{.cu = random() % 4 ? cu : nullptr,
                      .used = random() % 2 ? used : nullptr,
                      .rows = 9,
                      .max_length = max};
    const RowRange rows = rows_of(s, 0);
    ASSERT_GE(rows.first, 0);
    ASSERT_GE(rows.length, 0);
    ASSERT_LE(rows.length, rows.capacity);
    ASSERT_LE(rows.length, max);
    ASSERT_LE(rows.first + rows.capacity, 9);
  }
}

constexpr int kCu[] = {0, 4};
static_assert(seq_info({.cu = kCu, .rows = 5, .max_length = 5}, {.rows = 3, .max_length = 3}, 0)
                  .q.length == 4);

}  // namespace
}  // namespace flash3
