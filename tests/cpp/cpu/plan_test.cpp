// SPDX-License-Identifier: Apache-2.0
// How the work is cut, and the backend's answers.

#include <algorithm>
#include <atomic>
#include <limits>
#include <set>

#include "core/backend.hpp"
#include "cpu/parallel.hpp"
#include "harness.hpp"
#include "ragged_batch.hpp"

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

// The list of blocks, and lengths that must be refused before anything is written.

// (sequence, index, lane) of each unit, task by task.
std::vector<std::vector<std::array<int64_t, 3>>> tasks_of(const WorkList& list) {
  std::vector<std::vector<std::array<int64_t, 3>>> all;
  for (int64_t task = 0; task < list.tasks(); ++task) {
    all.emplace_back();
    list.for_each_unit(task, [&](int64_t unit) {
      const Block& block = list.block_of(unit);
      all.back().push_back({block.sequence, block.index, list.lane_of(unit)});
    });
  }
  return all;
}

TEST(WorkList, TheMostUrgentComeFirstAndLongOnesAlone) {
  WorkList list(2);
  list.add({.sequence = 0, .index = 0, .cost = 1e7, .urgency = 1e7});
  list.add({.sequence = 1, .index = 0, .cost = 3e7, .urgency = 3e7});
  list.add({.sequence = 2, .index = 0, .cost = 1e7, .urgency = 1e7});
  list.close(2);
  using Units = std::vector<std::vector<std::array<int64_t, 3>>>;
  EXPECT_EQ(tasks_of(list),
            (Units{{{1, 0, 0}}, {{1, 0, 1}}, {{0, 0, 0}}, {{0, 0, 1}}, {{2, 0, 0}}, {{2, 0, 1}}}));
}

TEST(WorkList, TinyOnesGoTogetherAndAllAreDone) {
  WorkList list(3);
  for (int64_t b = 0; b < 10000; ++b) {
    const double cost = 100 + static_cast<double>(b % 7);
    list.add({b, 0, cost, cost});
  }
  list.close(2);
  const auto tasks = tasks_of(list);
  EXPECT_LT(tasks.size(), 100u);
  EXPECT_GE(tasks.size(), 8u);
  std::set<std::array<int64_t, 3>> seen;
  for (const auto& task : tasks) {
    EXPECT_FALSE(task.empty());
    seen.insert(task.begin(), task.end());
  }
  EXPECT_EQ(seen.size(), 30000u);
}

TEST(WorkList, NothingIsNoTask) {
  WorkList list(4);
  list.close(3);
  EXPECT_EQ(list.tasks(), 0);
}

// A wrong length, on the forward and on the backward: the sentence holds `parts`, nothing is
// written.
template <class Change>
void expect_refused(const Change& change, const std::vector<std::string>& parts) {
  RaggedSpec spec;
  spec.lengths_q = {3, 4}, spec.lengths_k = {5, 6};
  spec.spare = 2;
  spec.sink = FLASH3_FLOAT32;
  RaggedBatch batch(spec);
  auto forward = batch.forward_params();
  change(&forward);
  auto backward = batch.backward_params();
  change(&backward);
  const auto untouched = batch.out.bytes, lse = batch.lse.bytes, dq = batch.dq.bytes,
             dk = batch.dk.bytes, dv = batch.dv.bytes;
  const std::vector<float> dsink = batch.dsink();

  const auto check = [&](const Status& status) {
    EXPECT_EQ(status.code(), FLASH3_INVALID_ARGUMENT);
    for (const std::string& part : parts)
      EXPECT_NE(status.message().find(part), std::string::npos)
          << part << " in " << status.message();
  };
  const ForwardProblem f = to_problem(forward);
  check(run_attention(f, plan_attention(f)));
  BackwardProblem b;
  ASSERT_TRUE(make_backward_problem(&backward, Pointers::kRequired, &b).ok());
  const BackwardPlan plan = plan_backward(b);
  std::vector<double> workspace(plan.workspace_size / sizeof(double) + 64);
  b.workspace = workspace.data(), b.workspace_size = workspace.size() * sizeof(double);
  check(run_backward(b, plan));
  EXPECT_EQ(batch.out.bytes, untouched);
  EXPECT_EQ(batch.lse.bytes, lse);
  EXPECT_TRUE(batch.dq.bytes == dq && batch.dk.bytes == dk && batch.dv.bytes == dv);
  EXPECT_EQ(batch.dsink(), dsink);
}

TEST(Lengths, WrongOnesAreRefusedBeforeAnythingIsWritten) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max(),
                    kLeast = std::numeric_limits<int32_t>::min();
  const auto set = [](auto member, int at, int32_t value) {
    return [=](auto* params) { static_cast<int32_t*>(member(params)->data)[at] = value; };
  };
  const auto cu_q = [](auto* p) { return &p->cu_seqlens_q; };
  const auto cu_k = [](auto* p) { return &p->cu_seqlens_k; };
  const auto used_q = [](auto* p) { return &p->seqused_q; };
  const auto used_k = [](auto* p) { return &p->seqused_k; };
  const std::string most = std::to_string(kMost), least = std::to_string(kLeast);
  expect_refused(set(cu_q, 0, -1), {"cu_seqlens_q[0] = -1"});
  expect_refused(set(cu_q, 0, kLeast), {"cu_seqlens_q[0] = " + least});
  expect_refused(set(cu_k, 1, 1), {"cu_seqlens_k[1] = 1", "cu_seqlens_k[0] = 2"});
  expect_refused(set(cu_k, 1, kLeast), {"cu_seqlens_k[1] = " + least});
  expect_refused(set(cu_q, 2, 15), {"cu_seqlens_q[2] = 15", "14"});
  expect_refused(set(cu_k, 2, kMost), {"cu_seqlens_k[2] = " + most});
  expect_refused(set(cu_q, 1, kMost), {"cu_seqlens_q[1] = " + most});
  expect_refused(set(used_q, 0, 4), {"seqused_q[0] = 4", "3"});
  expect_refused(set(used_k, 1, -1), {"seqused_k[1] = -1"});
  expect_refused(set(used_k, 1, kMost), {"seqused_k[1] = " + most, "8"});
  expect_refused(set(used_q, 1, kLeast), {"seqused_q[1] = " + least});
  expect_refused([](auto* p) { p->max_seqlen_k = 5; }, {"max_seqlen_k = 5", "6"});
}

// What a call needs and does is told without its lengths.
TEST(RaggedPlan, AnswersQuestionsWithoutPointers) {
  RaggedSpec spec;
  spec.lengths_q = std::vector<int64_t>(50, 30), spec.lengths_k = spec.lengths_q;
  spec.sink = FLASH3_FLOAT32;
  RaggedBatch batch(spec);
  auto params = batch.backward_params();
  BackwardProblem with, without;
  ASSERT_TRUE(make_backward_problem(&params, Pointers::kRequired, &with).ok());
  for (auto* t : {&params.q, &params.k, &params.v, &params.out, &params.lse, &params.dout,
                  &params.dlse, &params.dq, &params.dk, &params.dv, &params.cu_seqlens_q,
                  &params.cu_seqlens_k, &params.sink, &params.dsink})
    t->data = nullptr;
  ASSERT_TRUE(make_backward_problem(&params, Pointers::kOptional, &without).ok());
  const BackwardPlan plan = plan_backward(without);
  EXPECT_EQ(plan_backward(with).workspace_size, plan.workspace_size);

  // Fifty sequences of 30 rows, not of all 1500.
  const size_t rows = 1505 * 2 + 50 * 5;
  EXPECT_LT(plan.workspace_size - plan.scratch_size * size_t(plan.threads),
            rows * (32 + 1) * sizeof(float) + 1024);

  auto forward = batch.forward_params();
  forward.cu_seqlens_q.data = forward.cu_seqlens_k.data = nullptr;
  ForwardProblem question;
  ASSERT_TRUE(make_forward_problem(&forward, Pointers::kOptional, &question).ok());
  PlanPointer<ForwardProblem> planned;
  ASSERT_TRUE(cpu_backend().plan(question, &planned).ok());
  EXPECT_EQ(planned->workspace_bytes(), 0u);
  Explanation explanation;
  planned->explain(question, &explanation);
  EXPECT_NE(explanation.text().find("the longest first"), std::string::npos) << explanation.text();
}

}  // namespace
}  // namespace flash3::test
