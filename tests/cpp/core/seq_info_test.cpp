// SPDX-License-Identifier: Apache-2.0
// Rows of a sequence: what cu_seqlens and seqused say, and that nothing they could hold leads
// outside the tensor.

#include "core/seq_info.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "call.hpp"

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

namespace flash3::test {
namespace {

// fill_padding, on host memory: which rows it fills, with what, and that nothing else changes.

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Rows 0 … 5 of a RaggedCall: those of tokens that count are 0, 1 and 2.
bool counts(int64_t row) { return row < 3; }

TEST(FillPadding, FillsRowsOfNoTokenAndNoOther) {
  RaggedCall plain, filled;
  Forward call = filled.forward();
  forward(plain.forward());
  call.fill_padding = true;
  forward(call);
  for (int64_t row = 0; row < RaggedCall::kTotalQ; ++row) {
    for (int64_t i = row * 64; i < (row + 1) * 64; ++i) {
      EXPECT_EQ(filled.out[size_t(i)], counts(row) ? plain.out[size_t(i)] : 0.f) << i;
      if (!counts(row)) {
        EXPECT_EQ(plain.out[size_t(i)], Call::kUntouched) << i;
      }
    }
    for (int64_t head = 0; head < 4; ++head) {
      const auto at = size_t(head * RaggedCall::kTotalQ + row);
      EXPECT_EQ(filled.lse[at], counts(row) ? plain.lse[at] : kNothing) << at;
    }
  }
}

TEST(FillPadding, WithoutSequencesFillsAll) {
  RaggedCall memory;
  Forward call = memory.forward();
  call.cu_seqlens_q.shape[0] = call.cu_seqlens_k.shape[0] = 1;
  call.seqused_q.shape[0] = call.seqused_k.shape[0] = 0;
  call.fill_padding = true;
  forward(call);
  for (const float x : memory.out) EXPECT_EQ(x, 0.f);
  for (const float x : memory.lse) EXPECT_EQ(x, kNothing);
}

TEST(FillPadding, FillsGradientsOfRowsOfNoSequence) {
  RaggedCall memory;
  forward(memory.forward());
  for (auto* gradient : {&memory.dq, &memory.dk, &memory.dv})
    std::fill(gradient->begin(), gradient->end(), NAN);
  alignas(FLASH3_WORKSPACE_ALIGNMENT) static char workspace[1 << 16];
  Backward call = memory.backward();
  call.num_threads = 1;
  call.workspace = workspace;
  call.workspace_size = sizeof workspace;
  std::fill(memory.dout.begin(), memory.dout.end(), 1.f);
  std::fill(memory.dlse.begin(), memory.dlse.end(), 0.f);
  backward(call);
  EXPECT_TRUE(std::isnan(memory.dq[5 * 32]));  // as it was
  call.fill_padding = true;
  backward(call);
  for (size_t i = 5 * 32; i < 6 * 32; ++i) EXPECT_EQ(memory.dq[i], 0.f) << i;
  for (size_t i = 8 * 16; i < 9 * 16; ++i) EXPECT_EQ(memory.dk[i], 0.f) << i;
  for (size_t i = 8 * 32; i < 9 * 32; ++i) EXPECT_EQ(memory.dv[i], 0.f) << i;
  for (const auto* gradient : {&memory.dq, &memory.dk, &memory.dv})
    for (const float x : *gradient) EXPECT_FALSE(std::isnan(x));
}

TEST(FillPadding, NothingIsFilledWhereLengthsAreRefused) {
  RaggedCall memory;
  memory.cu_q = {0, 5, 2};
  Forward call = memory.forward();
  call.fill_padding = true;
  EXPECT_THROW(forward(call), Error);
  for (const float x : memory.out) EXPECT_EQ(x, Call::kUntouched);
}

TEST(FillPadding, IsAFlag) {
  RaggedCall memory;
  flash3_forward_params p = memory.forward().params();
  p.fill_padding = 2;
  EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "fill_padding = 2 but it must be 0 or 1");
  flash3_backward_params b = memory.backward().params();
  b.fill_padding = -1;
  EXPECT_EQ(flash3_backward(&b), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "fill_padding = -1 but it must be 0 or 1");
}

TEST(FillPadding, IsExplained) {
  RaggedCall memory;
  Forward call = memory.forward();
  EXPECT_EQ(explain(call).find("padding"), std::string::npos);
  call.fill_padding = true;
  EXPECT_NE(explain(call).find("padding: rows that belong to no token are filled at the end\n"),
            std::string::npos);
}

}  // namespace
}  // namespace flash3::test
