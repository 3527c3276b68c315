// SPDX-License-Identifier: Apache-2.0
// How the work is cut, and the backend's answers.
#include <algorithm>
#include <atomic>

#include "core/backend.hpp"
#include "cpu/parallel.hpp"
#include "harness.hpp"

namespace flash3::test {
namespace {

ForwardProblem question(const std::string& id, int num_threads) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  EXPECT_TRUE(c) << error;
  auto params = cases::make_question(*c);
  params.num_threads = num_threads;
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

TEST(Plan, TinyCallsStayOnOneThread) {
  for (const char* id : {"fp32/b1/q1/k1/h1/d64/full", "bf16/b1/q16/k16/h4/d64/full"})
    EXPECT_EQ(plan_attention(question(id, 64)).threads, 1) << id;
}

TEST(Plan, OneLongHeadFillsAllThreads) {
  for (const int threads : {2, 8, 32}) {
    const auto plan = plan_attention(question("bf16/b1/q4096/k4096/h1/d64/causal", threads));
    EXPECT_EQ(plan.threads, threads);
    EXPECT_GE(plan.tasks, threads);
    EXPECT_EQ(plan.splits, 1);
    EXPECT_EQ(plan.workspace_size, 0u);
  }
}

TEST(Plan, OneQueryOverManyKeysFillsAllThreads) {
  for (const int threads : {2, 8, 32}) {
    const auto plan = plan_attention(question("bf16/b1/q1/k131072/h1/d128/full", threads));
    EXPECT_EQ(plan.threads, threads);
    EXPECT_GE(plan.splits, threads);
    EXPECT_GE(plan.workspace_size, static_cast<size_t>(plan.splits) * 130 * sizeof(float));
  }
  EXPECT_EQ(plan_attention(question("bf16/b1/q1/k131072/h1/d128/full", 1)).workspace_size, 0u);
}

TEST(Plan, AbsurdNumbersOfThreadsAreBounded) {
  const auto plan = plan_attention(question("bf16/b64/q65536/k65536/h64/d128/full", 2000000000));
  EXPECT_LE(plan.threads, 4096);
  EXPECT_GE(plan.threads, 1024);
}

// Three heads for two threads: one would be left with the third.
TEST(Plan, FewTasksThatDoNotDivideAreSplit) {
  const auto plan = plan_attention(question("bf16/b1/q1/k65536/h3/d128/full", 2));
  EXPECT_GE(plan.tasks, 8);
  EXPECT_EQ(plan_attention(question("bf16/b1/q1/k65536/h4/d128/full", 2)).splits, 1);
}

// Parts are whole tiles and cover all keys; blocks cover all rows.
TEST(Plan, CoversEverything) {
  for (const char* id : {"fp32/b1/q1/k100001/h1/d64/full", "bf16/b3/q777/k5/h6x2/d256/full",
                         "fp16/b1/q13/k40000/h8x1/d128/causal", "fp32/b1/q1000/k64/h1/d1/full"}) {
    const ForwardProblem p = question(id, 16);
    const auto plan = plan_attention(p);
    EXPECT_EQ(plan.tile.keys % kKeyAlignment, 0) << id;
    EXPECT_GE(plan.splits * plan.split_keys, p.seq_k) << id;
    EXPECT_LT((plan.splits - 1) * plan.split_keys, p.seq_k) << id;
    if (plan.splits > 1) {
      EXPECT_EQ(plan.split_keys % plan.tile.keys, 0) << id;
    }
    const int64_t rows = p.seq_q * p.queries_per_kv_head();
    EXPECT_GE(plan.row_blocks * plan.tile.rows, rows) << id;
    EXPECT_LT((plan.row_blocks - 1) * plan.tile.rows, rows) << id;
    EXPECT_EQ(plan.tasks, p.batch * p.heads_k * plan.row_blocks * plan.splits) << id;
  }
}

TEST(Plan, EmptyCallsHaveNoTasks) {
  for (const char* id : {"fp32/b0/q4/k4/h1/d64/full", "fp32/b1/q0/k4/h1/d64/full"})
    EXPECT_EQ(plan_attention(question(id, 0)).tasks, 0) << id;
}

TEST(Targets, BaselineFirstAndTheBestIsChosen) {
  const auto targets = supported_targets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(targets.front(), CpuTarget::kBaseline);
  EXPECT_TRUE(std::is_sorted(targets.begin(), targets.end()));
  EXPECT_EQ(plan_attention(question("bf16/b1/q4/k4/h1/d64/full", 0)).target, targets.back());
  for (const char* id : {"fp32/b1/q4/k4/h1/d64/full", "fp16/b1/q4/k4/h1/d64/full"}) {
    const CpuTarget target = plan_attention(question(id, 0)).target;
    EXPECT_EQ(target, *std::find_if(targets.rbegin(), targets.rend(),
                                    [](CpuTarget t) { return t != CpuTarget::kAmx; }))
        << id;
  }
}

TEST(Backend, DescribesAndExplains) {
  const Backend& cpu = cpu_backend();
  EXPECT_TRUE(cpu.available().ok());
  EXPECT_EQ(cpu.describe().find(target_name(supported_targets().back())), 0u);
  EXPECT_NE(cpu.describe().find("thread"), std::string::npos);

  const ForwardProblem p = question("bf16/b1/q1/k100000/h8x1/d128/full", 4);
  PlanPointer<ForwardProblem> plan;
  ASSERT_TRUE(cpu.plan(p, &plan).ok());
  EXPECT_EQ(plan->workspace_bytes(), plan_attention(p).workspace_size);
  Explanation explanation;
  plan->explain(p, &explanation);
  const std::string text = explanation.text();
  for (const char* part :
       {"kernel: cpu_fwd_bf16_", "\ntile: ", "\ntasks: ", "\nsplit: ", "\nwhy: "})
    EXPECT_NE(("\n" + text).find(part), std::string::npos) << part << " in\n" << text;
}

TEST(Workers, EveryWorkerRunsOnceAndTheFirstIsTheCaller) {
  std::vector<std::atomic<int>> runs(5);
  std::thread::id caller;
  run_workers(5, [&](int worker) {
    runs[static_cast<size_t>(worker)]++;
    if (worker == 0) caller = std::this_thread::get_id();
  });
  for (const auto& count : runs) EXPECT_EQ(count, 1);
  EXPECT_EQ(caller, std::this_thread::get_id());
  EXPECT_GE(available_threads(), 1);
}

}  // namespace
}  // namespace flash3::test
