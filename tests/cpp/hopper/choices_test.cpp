// SPDX-License-Identifier: Apache-2.0
// Which heads a tile of the forward kernels may hold, which kernels a call may take, and how long
// each is expected to run. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cuda/sm90/forward/plan.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

// HeadPack divides by a reciprocal.
constexpr bool divides_exactly() {
  for (int heads = 1; heads <= HeadPack::kRows; ++heads) {
    const HeadPack pack = HeadPack::of(heads);
    for (int row = 0; row < HeadPack::kRows; ++row) {
      if (pack.query_of(row) != row / heads || pack.head_of(row) != row % heads) return false;
    }
  }
  return true;
}
static_assert(divides_exactly(), "the reciprocal is not precise enough");

TEST(HeadPack, EveryHeadOfEveryQueryHasOneRow) {
  for (int heads = 1; heads <= HeadPack::kRows; ++heads) {
    const HeadPack pack = HeadPack::of(heads);
    ASSERT_LE(pack.rows(), HeadPack::kRows);
    EXPECT_GT(pack.rows() + heads, HeadPack::kRows) << "room for one more query of " << heads;
    std::vector<int> seen(static_cast<size_t>(pack.rows()));
    for (int row = 0; row < pack.rows(); ++row) {
      const int query = pack.query_of(row), head = pack.head_of(row);
      ASSERT_TRUE(query >= 0 && query < pack.queries && head >= 0 && head < heads)
          << heads << " heads, row " << row;
      ++seen[static_cast<size_t>(query * heads + head)];
    }
    EXPECT_EQ(std::accumulate(seen.begin(), seen.end(), 0), pack.rows());
    for (const int times : seen) EXPECT_EQ(times, 1) << heads << " heads";
    // Idle rows never count as one of the box's queries.
    for (int row = pack.rows(); row < HeadPack::kRows; ++row)
      EXPECT_GE(pack.query_of(row), pack.queries) << heads << " heads, row " << row;
  }
}

TEST(HeadPack, OneHeadIsARowAQuery) {
  constexpr HeadPack pack;
  static_assert(pack.rows() == 64 && pack.query_of(63) == 63 && pack.head_of(63) == 0);
  EXPECT_EQ(HeadPack::of(1).reciprocal, pack.reciprocal);
}

TEST(Choices, AreTheDivisorsOfTheHeadsPerKvHead) {
  const auto packs = [](const char* heads) {
    std::vector<int> list;
    for (const ForwardChoice& choice :
         forward_choices(problem_of(std::string("bf16/b1/q100/k100/h") + heads + "/d256/causal")))
      list.push_back(choice.pack.heads);
    return list;
  };
  EXPECT_EQ(packs("5"), (std::vector{1}));
  EXPECT_EQ(packs("8x1"), (std::vector{1, 2, 4, 8}));
  EXPECT_EQ(packs("24x4"), (std::vector{1, 2, 3, 6}));
  EXPECT_EQ(packs("71x1"), (std::vector{1}));
  EXPECT_EQ(packs("128x1"), (std::vector{1, 2, 4, 8, 16, 32, 64}));
}

// TMA steps from head to head by a stride below 2^40 bytes, packed or not.
TEST(Choices, PackHeadsThatTmaReaches) {
  ForwardProblem problem = problem_of("bf16/b1/q1/k100/h16x2/d256/full");
  ASSERT_EQ(forward_choices(problem).size(), 4u);
  for (const int64_t stride : {int64_t{1} << 37, int64_t{1} << 39}) {  // 2^38, 2^40 bytes
    problem.q.stride_head = problem.out.stride_head = stride;
    const bool reached = stride < int64_t{1} << 39;
    const auto choices = forward_choices(problem);
    ASSERT_EQ(choices.size(), 4u);
    for (const ForwardChoice& choice : choices) {
      PlannedForward plan;
      ASSERT_TRUE(plan_choice(problem, kDevice, choice, &plan).ok());
      EXPECT_EQ(plan.out_by_tma, reached) << choice.pack.heads;
      EXPECT_EQ(plan.q.needed, !reached) << choice.pack.heads;
    }
  }
}

TEST(Choices, CoverEveryQueryOnce) {
  for (const char* heads : {"12x1", "28x4", "40x8"})
    for (const char* dim : {"64", "128", "256"})
      for (const int seq_q : {1, 5, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000}) {
        const ForwardProblem problem = problem_of("bf16/b3/q" + std::to_string(seq_q) + "/k77/h" +
                                                  heads + "/d" + dim + "/causal");
        for (const ForwardChoice& choice : forward_choices(problem)) {
          PlannedForward plan;
          ASSERT_TRUE(plan_choice(problem, kDevice, choice, &plan).ok());
          const int queries = choice.kernel->config.warpgroups * choice.pack.queries;
          EXPECT_GE(plan.m_tiles * queries, seq_q);
          EXPECT_LT((plan.m_tiles - 1) * queries, seq_q);
          EXPECT_EQ(plan.groups * choice.pack.heads, 3 * problem.heads_q);
          EXPECT_EQ(plan.tiles, plan.m_tiles * plan.groups);
          EXPECT_GE(plan.groups_at_a_time, 1);
          EXPECT_LE(plan.groups_at_a_time, plan.groups);
        }
      }
}

Estimate estimate_of(const std::string& id, int multiprocessors = 132) {
  const ForwardProblem problem = problem_of(id);
  const ForwardChoice choice = forward_choices(problem).front();
  return estimate_forward(problem, choice.kernel->config, choice.pack, 0, multiprocessors);
}

TEST(Estimate, CountsWholeRounds) {
  const auto us = [](int heads) {
    return estimate_of("bf16/b1/q128/k1760/h" + std::to_string(heads) + "/d128/full").us;
  };
  EXPECT_EQ(us(1), us(132));
  EXPECT_DOUBLE_EQ(us(133), 2 * us(132));
  EXPECT_DOUBLE_EQ(us(1320), 10 * us(132));
}

TEST(Estimate, IsNeverLessThanTheLongestTile) {
  // 64 tiles of one head on as many multiprocessors: the last one has 64 key tiles, the mean 32.5.
  const double causal = estimate_of("bf16/b1/q8192/k8192/h1/d128/causal").us;
  const double row = estimate_of("bf16/b1/q128/k8192/h1/d128/causal").us;  // that tile alone
  EXPECT_EQ(causal, row);
  // Many heads: the mean counts.
  const double many = estimate_of("bf16/b1/q8192/k8192/h132/d128/causal").us;
  EXPECT_NEAR(many / (64 * row), 0.5, 0.05);
}

TEST(Estimate, AWindowCostsWhatItSees) {
  const auto us = [](const char* mask) {
    return estimate_of(std::string("bf16/b1/q32768/k32768/h16/d128/") + mask).us;
  };
  EXPECT_LT(us("causal+w1024:"), 0.1 * us("causal"));
  EXPECT_NEAR(us("causal") / us("full"), 0.55, 0.1);
}

TEST(Estimate, SmallGainsAreNotTaken) {
  const Estimate base{1, 100, 1000};
  EXPECT_FALSE(is_better({1, 100, 1000}, base, kRowMargin));
  EXPECT_FALSE(is_better({1, 90, 995}, base, kRowMargin));
  EXPECT_TRUE(is_better({1, 100, 985}, base, kRowMargin));
  EXPECT_TRUE(is_better({1, 50, 1000}, base, kRowMargin)) << "as fast with half the tiles";
  EXPECT_FALSE(is_better({1, 50, 1001}, base, kRowMargin));
}

}  // namespace
}  // namespace flash3::cuda::sm90
