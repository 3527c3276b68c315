// SPDX-License-Identifier: Apache-2.0
// What is AMX's own. That its results are right is tested with those of the other instruction sets:
// with the real tiles where there are some, and with emulated ones.
#include <algorithm>

#include "core/backend.hpp"
#include "harness.hpp"

namespace flash3::test {
namespace {

cases::ForwardTensors tensors_of(const std::string& id, flash3_forward_params* params) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  EXPECT_TRUE(c) << error;
  cases::ForwardTensors t = cases::make_forward_tensors(*c);
  *params = cases::make_params(*c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view);
  return t;
}

bool has(CpuTarget target) {
  const auto targets = supported_targets();
  return std::find(targets.begin(), targets.end(), target) != targets.end();
}

// Rows and head dims around the edges of tiles (16 rows, 32 elements, 16 columns) and strips.
TEST(Amx, EdgesOfTiles) {
  if (!has(CpuTarget::kAvx3Zen4)) GTEST_SKIP() << why_no_amx();
  for (const char* queries : {"q9", "q15", "q16", "q17", "q31", "q32", "q33", "q47", "q49", "q97"})
    for (const char* rest :
         {"/k31/h1/d31x15/causal", "/k32/h1/d32x16/full", "/k33/h1/d33x17/w5:9",
          "/k255/h1/d63x33/w40:", "/k257/h2x1/d65x47/causal", "/k300/h1/d96x49/w:3"})
      check_case(std::string("bf16/b1/") + queries + rest, 1);
}

// Blocks of rows end where strips do; parts and blocks still cover everything.
TEST(Amx, PlansInWholeStrips) {
  flash3_forward_params params;
  const auto t = tensors_of("bf16/b1/q1000/k300/h1/d64/full", &params);
  const ForwardProblem problem = to_problem(params);
  const AttentionPlan plan = plan_attention(problem, CpuTarget::kAmx);
  EXPECT_EQ(plan.tile.rows % 32, 0);
  EXPECT_GE(plan.row_blocks * plan.tile.rows, 1000);
  EXPECT_LT((plan.row_blocks - 1) * plan.tile.rows, 1000);
}

// Its absence has a reason, and its presence none.
TEST(Amx, IsSupportedOrSaysWhyNot) {
  EXPECT_EQ(has(CpuTarget::kAmx), why_no_amx().empty()) << why_no_amx();
}

TEST(Amx, ExplainsItself) {
  if (!has(CpuTarget::kAmx)) GTEST_SKIP() << why_no_amx();
  flash3_forward_params params;
  const auto t = tensors_of("bf16/b1/q100/k300/h1/d64/full", &params);
  const ForwardProblem problem = to_problem(params);
  PlanPointer<ForwardProblem> plan;
  ASSERT_TRUE(cpu_backend().plan(problem, &plan).ok());
  Explanation explanation;
  plan->explain(problem, &explanation);
  const std::string text = explanation.text();
  EXPECT_NE(text.find("cpu_fwd_bf16_amx\n"), std::string::npos) << text;
  EXPECT_EQ(cpu_backend().describe().find("AMX, "), 0u);
}

}  // namespace
}  // namespace flash3::test
