// SPDX-License-Identifier: Apache-2.0
// Which calls run their sequences in two kinds of kernels, and with what. Needs no GPU: a plan
// launches nothing.
#include <gtest/gtest.h>

#include <algorithm>

#include "cases/cache_tensors.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

PlannedSteps plan_of(const std::string& id) {
  const PlannedSteps steps = steps_of(problem_of(id));
  EXPECT_TRUE(steps.forward && steps.decode) << id;
  return steps;
}

TEST(MixedPlan, RunsCallsWhoseSequencesMayDiffer) {
  for (const char* id : {"bf16/b4/q17/k300/h8/d128/causal/packedq/usedk/paged16",
                         "bf16/b4/q17/k300/h8/d128/causal/packedq/nomax/usedk/paged16",
                         "fp16/b4/q200/k300/h8x2/d64/full/used/paged64",
                         "fp16/b4/q200/k20/h8x2/d64/full/packedq/usedk/batchidx",
                         "bf16/b4/q200/k300/h8x2/d256/causal/packedq/usedk/append3",
                         "bf16/b4/q200/k256/h8x2/d128/causal/packedq/usedk",
                         "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk",
                         "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk/paged16",
                         "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk/append3/headscales",
                         "bf16/b4/q200/k300/h8/d128/causal/packedq/usedk/paged16/kv8",
                         "bf16/b4/q200/k23/h8/d128/causal/packedq/usedk/kv8",
                         "fp16/b3/q63/k300/h1/d64/causal/usedq/kv8"})
    EXPECT_TRUE(is_mixed(problem_of(id))) << id;
}

// Sequences of one kind alone, and training batches: those pack both sides, or pad both.
TEST(MixedPlan, LeavesAllOthersAlone) {
  for (const char* id :
       {"bf16/b4/q16/k300/h8/d128/causal/packedq/usedk/paged16",
        "bf16/b4/q200/k300/h8/d128/causal/usedk/paged16",
        "bf16/b4/q200/k300/h8/d128/causal/packedq/usedk/paged3",
        "bf16/b4/q200/k255/h8/d128/causal/packedq/usedk", "bf16/b4/q200/k300/h8/d128/causal/used",
        "bf16/b4/q300/k300/h8/d128/causal/packed", "bf16/b4/q300/k300/h8/d128/causal",
        "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk/sums2",
        "bf16/b4/q200/k300/h8/d128/causal/packedq/usedk/paged64/kv8/blockscales"})
    EXPECT_FALSE(is_mixed(problem_of(id))) << id;
}

// The decode kernels' share follows from 16 queries, whatever the call's most are; but its kernel
// is the one for a few.
TEST(MixedPlan, PlansDecodingAsIfAlone) {
  const std::string rest = "/k3000/h32x8/d128/causal/packedq/usedk/paged64";
  const ForwardProblem decoding = problem_of("bf16/b4/q4" + rest);
  PlannedDecode alone;
  ASSERT_TRUE(cuda::sm90::plan(decoding, kDevice, &alone).ok());
  for (const char* most : {"17", "200", "2048"}) {
    const PlannedSteps plan = plan_of(std::string("bf16/b4/q") + most + rest);
    EXPECT_EQ(plan.decode->kernel, alone.kernel);
    EXPECT_EQ(plan.decode->rule.tile_queries, alone.rule.tile_queries);
    EXPECT_EQ(plan.decode->rule.splits, alone.rule.splits);
    EXPECT_EQ(plan.decode->rule.least_tiles, alone.rule.least_tiles);
    EXPECT_EQ(plan.decode->rule.most_queries, 16);
    EXPECT_EQ(plan.forward->least_queries, 17);
    EXPECT_LE(plan.decode->most_items,
              4 * 8 * int64_t{ceil_div(16, plan.decode->rule.tile_queries)});
  }
}

// Each sequence has work in one of the two.
TEST(MixedPlan, ASequenceHasWorkInOneKernel) {
  const ForwardProblem problem =
      problem_of("bf16/b4/q40/k300/h8/d128/causal/packedq/usedk/paged16");
  const PlannedSteps plan = plan_of("bf16/b4/q40/k300/h8/d128/causal/packedq/usedk/paged16");
  EXPECT_EQ(varlen_schedule_params(problem, *plan.forward).least_queries, 17);
  const int cu[] = {0, 16, 33, 34, 34}, used[] = {300, 300, 0, 10};
  DecodeRule rule = plan.decode->rule;
  rule.q = {cu, nullptr, 160, 40};
  rule.k = {nullptr, used, 300, 300};
  const int expected[] = {16, 0, 1, 0};
  for (int b = 0; b < 4; ++b) {
    const DecodeSequence s = decode_sequence(rule, b);
    EXPECT_EQ(s.q_length, expected[b]) << b;
    EXPECT_EQ(items_of(rule, s) > 0, expected[b] > 0) << b;
  }
}

// Padded queries lie where the whole tensor has them, the few of a decoding sequence too.
TEST(MixedPlan, BothReadTheRotatedQueries) {
  for (const char* id :
       {"fp16/b2/q135/k127/h1/d136/full/used/leftpad/append1/rotary",
        "fp16/b2/q135/k127/h4x2/d128/causal/packedq/usedk/paged16/append1/rotary"}) {
    const ForwardProblem problem = problem_of(id);
    const PlannedSteps plan = plan_of(id);
    EXPECT_GT(plan.append.q_blocks, 0) << id;
    EXPECT_EQ(transformed_q(problem, plan.append).stride_batch,
              problem.sequences_q.packed ? 0 : 135 * problem.heads_q * problem.head_dim)
        << id;
  }
}

// No part of the workspace is another's.
TEST(MixedPlan, TheWorkspaceHoldsBoth) {
  const std::string id = "bf16/b4/q200/k3000/h8x2/d128/causal/packedq/usedk/paged64/append1/rotary";
  const PlannedSteps plan = plan_of(id);
  PlannedForward forward;
  ASSERT_TRUE(cuda::sm90::plan(problem_of(id), kDevice, &forward).ok());
  EXPECT_GE(plan.decode->schedule_offset, forward.workspace_bytes);
  EXPECT_GE(plan.decode->partials_offset,
            plan.decode->schedule_offset + plan.decode->schedule_bytes);
  EXPECT_GT(plan.workspace_bytes, plan.decode->partials_offset);
  const ScheduleNeeds needs = needs_of(plan);
  EXPECT_EQ(needs.bytes, plan.decode->schedule_bytes);
  EXPECT_GT(needs.bytes, 0u);
}

TEST(MixedPlan, IsExplained) {
  const std::string id = "bf16/b2/q200/k300/h8x2/d128/causal/packedq/usedk/paged64/append1";
  const std::string text = explained(problem_of(id));
  for (const char* line :
       {"kernel: fwd_bf16_d128_split_128x128, decode_bf16_d128_16x128",
        "why: a sequence of at most 16 queries runs in the decode kernel",
        "forward kernel: fwd_bf16_d128_split_128x128",
        "forward first: a kernel of its own: the new keys and values go into the cache",
        "decode splits: of a sequence at most"})
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
}

}  // namespace
}  // namespace flash3::cuda::sm90
