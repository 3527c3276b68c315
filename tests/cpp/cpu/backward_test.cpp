// SPDX-License-Identifier: Apache-2.0
// The CPU backward on every instruction set that this machine runs, against the oracle.
#include "cpu/backward.hpp"

#include <algorithm>
#include <limits>

#include "cases/table.hpp"
#include "core/backend.hpp"
#include "core/convert.hpp"
#include "harness.hpp"
#include "oracle/attention_ref.hpp"

namespace flash3::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

BackwardProblem to_problem(const flash3_backward_params& params) {
  BackwardProblem problem;
  const Status status = make_backward_problem(&params, Pointers::kRequired, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

cases::Case parse(const std::string& id) {
  std::string error;
  const auto c = cases::parse_id(id + "/bwd", &error);
  EXPECT_TRUE(c) << error;
  return c.value();
}

// A case with its forward done.
struct Backward {
  cases::Case c;
  cases::BackwardTensors tensors;
  BackwardProblem problem;

  explicit Backward(const std::string& id)
      : c(parse(id)), tensors(cases::make_backward_tensors(c)) {
    problem = to_problem(cases::make_backward_params(c, tensors.views()));
  }
  // change(tensors) edits the inputs of the forward.
  template <class Change>
  Backward(const std::string& id, const Change& change) : Backward(id) {
    change(tensors);
    const auto t = tensors.views();
    run_on({CpuTarget::kBaseline},
           test::to_problem(cases::make_params(c, t.q, t.k, t.v, t.out, t.lse)));
  }

  // Fills the results with the pattern, then computes them.
  BackwardPlan run(const TestTarget& target, int threads) {
    for (auto* t : {&tensors.dq, &tensors.dk, &tensors.dv})
      std::fill(t->bytes.begin(), t->bytes.end(), std::byte{0xFF});
    problem.num_threads = threads;
    const BackwardPlan plan = plan_backward_on(target, problem);
    Workspace workspace(plan.workspace_size + 64);
    BackwardProblem with_workspace = problem;
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    with_workspace.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
    with_workspace.workspace_size = plan.workspace_size;
    const Status status = run_backward(with_workspace, plan);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(workspace.guard_is_intact());
    for (const auto* t : {&tensors.dq, &tensors.dk, &tensors.dv}) EXPECT_EQ(t->damage(), "");
    return plan;
  }

  // What is wrong with dq, dk and dv; "" if nothing is.
  std::string error() const {
    return check_gradients(c, tensors.views(),
                           attention_backward_ref(problem, 1, tensors.extra.mask_pairs()))
        .failure();
  }
};

void check(Backward& backward, int threads) {
  for (const TestTarget& target : backward_targets(backward.problem.dtype)) {
    SCOPED_TRACE(target.name());
    backward.run(target, threads);
    EXPECT_EQ(backward.error(), "");
  }
}

void check(const std::string& id, int threads) {
  SCOPED_TRACE(id + " on " + std::to_string(threads));
  Backward backward(id);
  check(backward, threads);
}

// Every two levels of every two factors meet.
TEST(Backward, MatchesTheOracle) {
  const std::vector<std::string> dtypes{"fp32", "bf16", "fp16"},
      queries{"q0", "q1", "q2", "q6", "q7", "q63", "q97", "q200"},
      keys{"k0", "k1", "k2", "k15", "k64", "k65", "k129", "k400"},
      dims{"d1", "d8", "d33", "d64", "d72", "d128", "d72x1", "d1x72", "d96x64", "d31x255", "d256"},
      heads{"h1", "h3", "h4x2", "h6x2", "h5x1"},
      masks{"full", "causal", "w0:0", "w10:0", "w3:5", "w100:", "w:17", "w1000:1000"},
      layouts{"", "/bhsd", "/padded", "/odd"}, extras{"", "/outliers", "/scale0.5", "/special"},
      dlse{"", "/dlse"};
  const std::vector<int> threads{1, 2, 3, 8};

  int cases = 0;
  const auto size = [](const auto& v) { return static_cast<int>(v.size()); };
  for (const auto& row :
       cases::pairwise({size(dtypes), size(queries), size(keys), size(dims), size(heads),
                        size(masks), size(layouts), size(extras), size(threads), size(dlse), 2})) {
    const auto pick = [&](const auto& v, int factor) {
      return v[static_cast<size_t>(row[factor])];
    };
    check(pick(dtypes, 0) + "/b" + std::to_string(row[10] + 1) + "/" + pick(queries, 1) + "/" +
              pick(keys, 2) + "/" + pick(heads, 4) + "/" + pick(dims, 3) + "/" + pick(masks, 5) +
              pick(layouts, 6) + pick(extras, 7) + pick(dlse, 9),
          pick(threads, 8));
    ++cases;
  }
  EXPECT_GE(cases, 8 * 11);
}

// Longer than a block of keys and of rows in every direction.
TEST(Backward, ManyBlocks) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const char* rest : {"/b1/q500/k900/h1/d64/full", "/b1/q700/k500/h2x1/d72/causal",
                             "/b1/q500/k500/h1/d40x72/w150:20", "/b1/q200/k600/h1/d256/w:100"})
      check(std::string(dtype) + rest, 2);
}

// Also for more threads than cores, where they wait for each other most.
TEST(Backward, SameBitsOnAnyNumberOfThreads) {
  for (const char* id : {"fp32/b2/q150/k600/h4x2/d64/causal", "bf16/b1/q300/k1100/h1/d128/full",
                         "fp16/b1/q300/k500/h1/d96/w150:0"}) {
    Backward backward(id);
    for (const TestTarget& target : backward_targets(backward.problem.dtype)) {
      const int keys = backward.run(target, 1).tile.keys;
      const auto& t = backward.tensors;
      const auto dq = t.dq.bytes, dk = t.dk.bytes, dv = t.dv.bytes;
      for (const int threads : {1, 2, 3, 7, 16}) {
        const BackwardPlan plan = backward.run(target, threads);
        EXPECT_EQ(plan.threads, std::min<int64_t>(threads, plan.tasks)) << id;
        if (threads == 16) {
          EXPECT_LT(plan.tile.keys, keys) << id;
        }
        EXPECT_EQ(dq, t.dq.bytes) << id << " " << target.name() << " " << threads;
        EXPECT_EQ(dk, t.dk.bytes) << id << " " << target.name() << " " << threads;
        EXPECT_EQ(dv, t.dv.bytes) << id << " " << target.name() << " " << threads;
      }
    }
  }
}

void set(const flash3_tensor& t, int64_t s, int64_t d, float x) {
  store_float(t.data, t.dtype, s * t.stride[1] + d, x);
}

// Infinities and NaNs reach only what sees them.
TEST(Backward, SpecialValuesOfMaskedKeys) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const char* mask : {"causal", "w3:2", "w0:0", "w:5"})
      for (const bool in_v : {true, false}) {
        const std::string id = std::string(dtype) + "/b1/q150/k150/h2x1/d40x33/" + mask;
        SCOPED_TRACE(id);
        Backward backward(id, [&](const cases::BackwardTensors& t) {
          const flash3_tensor& spoilt = in_v ? t.v.view : t.k.view;
          for (int64_t j = 100; j < 150; ++j)
            for (int64_t d = 0; d < spoilt.shape[3]; ++d)
              set(spoilt, j, d, (j + d) % 3 == 0 ? kNaN : kInf);
        });
        check(backward, 2);
      }
}

// Nor do rows spoil the keys that they do not see.
TEST(Backward, SpecialValuesOfBlindRows) {
  for (const char* id : {"fp32/b1/q150/k150/h1/d64/causal", "bf16/b1/q120/k40/h1/d64/causal"}) {
    SCOPED_TRACE(id);
    Backward backward(id);
    for (int64_t i = 0; i < 40; ++i) {
      set(backward.tensors.q.view, i, i % 64, kNaN);
      set(backward.tensors.dout.view, i, i % 64, kInf);
    }
    check(backward, 1);
  }
}

// All scores −∞, so that lse is too: the row saw nothing, and K, though infinite, adds nothing to
// its gradient.
TEST(Backward, AllScoresMinusInfinity) {
  Backward backward("fp32/b1/q10/k30/h1/d1/full", [](const cases::BackwardTensors& t) {
    for (int64_t i = 0; i < 10; ++i) set(t.q.view, i, 0, 1.f);
    for (int64_t j = 0; j < 30; ++j) set(t.k.view, j, 0, -kInf);
  });
  for (const TestTarget& target : backward_targets(backward.problem.dtype)) {
    backward.run(target, 1);
    const auto& t = backward.tensors;
    for (const auto* gradient : {&t.dq, &t.dk, &t.dv})
      for (int64_t s = 0; s < gradient->view.shape[1]; ++s)
        EXPECT_EQ(static_cast<float*>(gradient->view.data)[s], 0.f) << target.name();
  }
}

TEST(BackwardPlan, SmallCallsStayOnOneThreadAndLongOnesFillAll) {
  EXPECT_EQ(Backward("fp32/b1/q16/k16/h4/d64/full").run({CpuTarget::kBaseline}, 64).threads, 1);
  Backward backward("bf16/b1/q1/k1/h1/d64/causal");
  BackwardProblem& p = backward.problem;
  p.seq_q = p.seq_k = 4096;
  for (const int threads : {2, 8, 32}) {
    p.num_threads = threads;
    const BackwardPlan plan = plan_backward(p);
    EXPECT_EQ(plan.threads, threads);
    EXPECT_GE(plan.tasks, threads);
    EXPECT_EQ(plan.tile.keys % kKeyAlignment, 0);
    EXPECT_EQ(plan.tile.rows % kBackwardStrip, 0);
  }
}

// Dot products where they are fast, tiles where there are some, and float32 for all other dtypes.
TEST(BackwardPlan, TakesTheFastestTargetOfTheDtype) {
  const auto target_for = [](const char* id) { return plan_backward(Backward(id).problem).target; };
  const CpuTarget best = best_target(FLASH3_BFLOAT16);
  const CpuTarget floats = std::min(best, CpuTarget::kAvx3);
  EXPECT_EQ(target_for("fp32/b1/q9/k9/h1/d64/full"), floats);
  EXPECT_EQ(target_for("fp16/b1/q9/k9/h1/d64/full"), floats);
  const bool slow = best == CpuTarget::kAvx3Zen4 && !has_fast_dot_products();
  EXPECT_EQ(target_for("bf16/b1/q9/k9/h1/d64/full"), slow ? floats : best);
}

// Rows, keys and head dims around the edges of tiles, strips and pairs.
TEST(Backward, EdgesOfTiles) {
  for (const char* queries : {"q9", "q31", "q32", "q33", "q49", "q95", "q97", "q193"})
    for (const char* rest :
         {"/k31/h1/d31x15/causal", "/k33/h1/d33x17/w5:9", "/k257/h2x1/d65x47/causal",
          "/k300/h1/d96x49/w:3", "/k449/h3x1/d1x130/w40:"})
      check(std::string("bf16/b1/") + queries + rest, 2);
}

// Far below the score matrix, and linear in the length.
TEST(BackwardPlan, WorkspaceIsLinear) {
  Backward backward("bf16/b1/q1/k1/h1/d64/causal");
  BackwardProblem& p = backward.problem;
  const auto bytes = [&](int64_t length) {
    p.seq_q = p.seq_k = length;
    p.num_threads = 1;
    return plan_backward(p).workspace_size;
  };
  EXPECT_LT(bytes(65536), size_t{65536} * 64 * 4 + (size_t{2} << 20));
  EXPECT_EQ(bytes(98304) - bytes(49152), bytes(147456) - bytes(98304));
}

TEST(BackwardBackend, ExplainsAndRuns) {
  Backward backward("bf16/b1/q300/k300/h8x1/d128/causal");
  BackwardProblem& p = backward.problem;
  p.num_threads = 2;
  PlanPointer<BackwardProblem> planned;
  ASSERT_TRUE(cpu_backend().plan(p, &planned).ok());
  Explanation explanation;
  planned->explain(p, &explanation);
  const std::string text = explanation.text();
  for (const char* part : {"kernel: cpu_bwd_bf16_",
                           "\nwhy: ", "\ntile: ", "\ntasks: ", "\nrows: ", "\ndeterministic: "})
    EXPECT_NE(("\n" + text).find(part), std::string::npos) << part << " in\n" << text;

  std::vector<double> workspace(planned->workspace_bytes() / sizeof(double) + 8);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  p.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
  p.workspace_size = planned->workspace_bytes();
  EXPECT_TRUE(planned->launch(p).ok());
  EXPECT_EQ(backward.error(), "");
}

}  // namespace
}  // namespace flash3::test
