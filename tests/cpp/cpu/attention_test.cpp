// SPDX-License-Identifier: Apache-2.0
// The CPU attention on every instruction set that this machine runs, against the oracle.

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cases/table.hpp"
#include "core/backend.hpp"
#include "core/convert.hpp"
#include "harness.hpp"

namespace flash3::test {
namespace {

// Every two levels of every two factors meet: dtype, lengths, head dims, heads, mask, layout,
// threads.
TEST(Attention, MatchesTheOracle) {
  const std::vector<std::string> dtypes{"fp32", "bf16", "fp16"},
      queries{"q0", "q1", "q2", "q5", "q6", "q7", "q63", "q64", "q65", "q127", "q300", "q1000"},
      keys{"k0", "k1", "k2", "k15", "k16", "k63", "k64", "k65", "k129", "k511", "k513", "k1100"},
      dims{"d1",  "d2",  "d8",   "d16",   "d33",   "d40",      "d64",     "d72",
           "d80", "d96", "d128", "d72x1", "d1x72", "d192x128", "d31x255", "d256"},
      heads{"h1", "h3", "h4x2", "h6x2", "h8x1"},
      masks{"full", "causal", "w0:0", "w10:0", "w3:5", "w100:", "w:17", "w1000:1000"},
      layouts{"", "/bhsd", "/padded", "/odd"}, extras{"", "/outliers", "/scale0.5", "/nolse"};
  const std::vector<int> threads{1, 2, 3, 8};

  int cases = 0;
  const auto size = [](const auto& v) { return static_cast<int>(v.size()); };
  for (const auto& row :
       cases::pairwise({size(dtypes), size(queries), size(keys), size(dims), size(heads),
                        size(masks), size(layouts), size(extras), size(threads), 2})) {
    const auto pick = [&](const auto& v, int factor) {
      return v[static_cast<size_t>(row[factor])];
    };
    check_case(pick(dtypes, 0) + "/b" + std::to_string(row[9] + 1) + "/" + pick(queries, 1) + "/" +
                   pick(keys, 2) + "/" + pick(heads, 4) + "/" + pick(dims, 3) + "/" +
                   pick(masks, 5) + pick(layouts, 6) + pick(extras, 7),
               pick(threads, 8));
    if (HasFatalFailure()) return;
    ++cases;
  }
  EXPECT_GE(cases, 12 * 16);
}

// Longer than a tile of keys and a block of rows in every direction.
TEST(Attention, ManyTiles) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    for (const char* rest : {"/b1/q1500/k1700/h1/d64/full", "/b1/q1700/k1500/h2x1/d128/causal",
                             "/b1/q1200/k1200/h1/d40x72/w300:20", "/b1/q400/k1300/h1/d256/w:500"})
      check_case(std::string(dtype) + rest, 2);
  }
}

// Multi-head latent attention: q in two parts, or values that are a part of the keys. Rows enough
// to pack K and V, and few that read them in place.
TEST(Attention, Latent) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const char* rest :
         {"/b2/q1/k300/h16x1/d64x512/full/qv", "/b2/q1/k300/h16x1/d576x512/full/latent",
          "/b1/q1/k5000/h1/d64x512/full/qv", "/b1/q3/k2500/h2x1/d576x512/causal/latent/odd",
          "/b2/q40/k70/h3x1/d31x41/causal/qv/odd", "/b2/q40/k70/h6x2/d70x33/w9:4/latent/padded"})
      check_case(std::string(dtype) + rest, 2);
}

// More threads than blocks of rows: the keys are split and the parts merged.
TEST(Attention, SplitKeys) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    for (const char* rest :
         {"/b1/q1/k20000/h1/d64/full", "/b1/q3/k17001/h8x1/d128/causal",
          "/b1/q2/k9000/h2x1/d96x33/w5000:0", "/b1/q1/k12000/h1/d80/w10:0/odd"}) {
      std::string error;
      const auto c = cases::parse_id(std::string(dtype) + rest, &error);
      ASSERT_TRUE(c) << error;
      auto question = cases::make_question(*c);
      question.num_threads = 8;
      ForwardProblem problem;
      ASSERT_TRUE(make_forward_problem(&question, Pointers::kOptional, &problem).ok());
      EXPECT_GT(plan_attention(problem).splits, 1) << rest;
      check_case(*c, 8);
    }
  }
}

// One row of one head, copied by a stride of zero to every batch, head and position.
TEST(Attention, BroadcastInputs) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16}) {
    const int64_t batch = 2, seq_q = 9, seq_k = 70, heads = 4, dim = 24;
    cases::GuardedTensor q = cases::make_tensor(dtype, 1, 1, 1, dim, cases::Layout::kOdd);
    cases::GuardedTensor k = cases::make_tensor(dtype, 1, seq_k, 1, dim, cases::Layout::kOdd);
    cases::GuardedTensor v = cases::make_tensor(dtype, 1, 1, 1, dim, cases::Layout::kOdd);
    cases::GuardedTensor out =
        cases::make_tensor(dtype, batch, seq_q, heads, dim, cases::Layout::kOdd);
    for (auto* t : {&q, &k, &v}) fill_random(t->view, cases::Distribution::kNormal, 7);
    const auto broadcast = [&](flash3_tensor t, int64_t seq, int64_t h) {
      for (const auto& [i, n] : {std::pair{0, batch}, std::pair{1, seq}, std::pair{2, h}}) {
        if (t.shape[i] == n) continue;
        t.shape[i] = n;
        t.stride[i] = 0;
      }
      return t;
    };
    flash3_forward_params params{};
    params.struct_size = sizeof params;
    params.q = broadcast(q.view, seq_q, heads);
    params.k = broadcast(k.view, seq_k, 2);
    params.v = broadcast(v.view, seq_k, 2);
    params.out = out.view;
    for (const TestTarget& target : test_targets(dtype)) {
      run_on(target, to_problem(params));
      EXPECT_EQ(out.damage(), "");
      // All values are one row of V, so that every output is that row.
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 0; i < seq_q; ++i)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t d = 0; d < dim; ++d) {
              const auto& s = out.view.stride;
              const float got =
                  load_float(out.view.data, dtype, b * s[0] + i * s[1] + h * s[2] + d);
              const float want = load_float(v.view.data, dtype, d);
              ASSERT_NEAR(got, want, (dtype == FLASH3_FLOAT32 ? 1e-6 : 1e-2) * std::abs(want))
                  << target.name();
            }
    }
  }
}

// The bits do not depend on the number of threads, as long as the keys are not split.
TEST(Attention, SameBitsOnAnyNumberOfThreads) {
  for (const char* id : {"fp32/b2/q300/k600/h4x2/d64/causal", "bf16/b1/q250/k1100/h2/d128/full"}) {
    std::string error;
    const cases::Case c = cases::parse_id(id, &error).value();
    cases::ForwardTensors t = cases::make_forward_tensors(c);
    ForwardProblem problem =
        to_problem(cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view));
    for (const TestTarget& target : test_targets(problem.dtype)) {
      problem.num_threads = 1;
      run_on(target, problem);
      const auto out = t.out.bytes, lse = t.lse.bytes;
      for (const int threads : {2, 3, 7}) {
        problem.num_threads = threads;
        const AttentionPlan plan = run_on(target, problem);
        EXPECT_EQ(plan.splits, 1) << id;
        EXPECT_EQ(plan.threads, threads) << id;
        EXPECT_EQ(out, t.out.bytes) << id << " " << target.name() << " " << threads;
        EXPECT_EQ(lse, t.lse.bytes) << id << " " << target.name() << " " << threads;
      }
    }
  }
}

// exp2, through an attention of two keys: scores 0 and −x give the probabilities
// 1 / (1 + e^−x) and e^−x / (1 + e^−x), which V = 1 makes outputs of.
TEST(Attention, ExponentialIsAccurate) {
  constexpr int kSamples = 4000;
  std::vector<float> q(kSamples), k{0.f, -1.f}, v{1.f, 0.f, 0.f, 1.f}, out(2 * kSamples),
      lse(kSamples);
  for (int i = 0; i < kSamples; ++i) q[static_cast<size_t>(i)] = 0.0213f * static_cast<float>(i);
  flash3_forward_params params{};
  params.struct_size = sizeof params;
  params.q = {q.data(), FLASH3_FLOAT32, 4, {1, kSamples, 1, 1}, {kSamples, 1, 1, 1}};
  params.k = {k.data(), FLASH3_FLOAT32, 4, {1, 2, 1, 1}, {2, 1, 1, 1}};
  params.v = {v.data(), FLASH3_FLOAT32, 4, {1, 2, 1, 2}, {4, 2, 2, 1}};
  params.out = {out.data(), FLASH3_FLOAT32, 4, {1, kSamples, 1, 2}, {2 * kSamples, 2, 2, 1}};
  params.lse = {lse.data(), FLASH3_FLOAT32, 3, {1, 1, kSamples, 0}, {kSamples, kSamples, 1, 0}};
  params.softmax_scale = 1.f;
  for (const TestTarget& target : test_targets(FLASH3_FLOAT32)) {
    run_on(target, to_problem(params));
    for (size_t i = 0; i < kSamples; ++i) {
      const double x = q[i], small = std::exp(-x) / (1 + std::exp(-x));
      // x · log2 e is rounded to float before the exponential sees it: an error that grows with x.
      const double tolerance = 4e-7 + 1.2e-7 * x;
      ASSERT_NEAR(out[2 * i + 1], small, tolerance * small) << target.name() << " x = " << x;
      ASSERT_NEAR(out[2 * i], 1 - small, 4e-7) << target.name() << " x = " << x;
      ASSERT_NEAR(lse[i], std::log1p(std::exp(-x)), 4e-7) << target.name() << " x = " << x;
    }
  }
}

// What is AMX's own. That its results are right is tested with those of the other instruction sets:
// with the real tiles where there are some, and with emulated ones.

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
