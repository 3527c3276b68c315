// The CPU backward on every instruction set that this machine runs, against sums in float64.
#include "cpu/backward.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/pairwise.hpp"
#include "core/backend.hpp"
#include "core/convert.hpp"
#include "harness.hpp"

namespace flash3::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TensorView to_view(const flash3_tensor& t) {
  const auto stride = [&](int i) { return t.shape[i] > 1 ? t.stride[i] : 0; };
  return {t.data, t.shape[0], t.shape[1], t.shape[2], t.shape[3], stride(0), stride(1), stride(2)};
}

LseView to_lse(const flash3_tensor& t) {
  return {static_cast<float*>(t.data), true, t.shape[0] > 1 ? t.stride[0] : 0,
          t.shape[1] > 1 ? t.stride[1] : 0};
}

// A case with its forward done.
struct Backward {
  cases::ForwardTensors forward;
  cases::GuardedTensor dout, dlse, dq, dk, dv;
  BackwardProblem problem;

  template <class Change>
  Backward(const std::string& id, const Change& change) {
    std::string error;
    const cases::Case c = cases::parse_id(id, &error).value();
    forward = cases::make_forward_tensors(c);
    change(forward);
    auto& [q, k, v, out, lse] = forward;
    const auto like = [&](const cases::GuardedTensor& t) {
      const auto& s = t.view.shape;
      return cases::make_tensor(c.dtype, s[0], s[1], s[2], s[3], c.layout);
    };
    dout = like(out), dq = like(q), dk = like(k), dv = like(v);
    dlse = cases::make_lse(c.batch, c.heads_q, c.seq_q, c.layout);
    cases::fill_random(dout.view, cases::Distribution::kNormal, 11);
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads_q; ++h)
        for (int64_t i = 0; i < c.seq_q; ++i)
          static_cast<float*>(
              dlse.view.data)[b * dlse.view.stride[0] + h * dlse.view.stride[1] + i] =
              cases::normal_value(12, static_cast<uint64_t>((b * c.heads_q + h) * c.seq_q + i));

    const ForwardProblem f =
        to_problem(cases::make_params(c, q.view, k.view, v.view, out.view, lse.view));
    run_on({CpuTarget::kBaseline}, f);
    static_cast<Problem&>(problem) = f;
    problem.dout = to_view(dout.view);
    problem.dlse = to_lse(dlse.view);
    problem.dq = to_view(dq.view);
    problem.dk = to_view(dk.view);
    problem.dv = to_view(dv.view);
  }
  explicit Backward(const std::string& id) : Backward(id, [](const auto&) {}) {}

  // Poisons the results, then computes them.
  BackwardPlan run(CpuTarget target, int threads) {
    for (auto* t : {&dq, &dk, &dv}) std::fill(t->bytes.begin(), t->bytes.end(), std::byte{0xFF});
    problem.num_threads = threads;
    const BackwardPlan plan = plan_backward(problem, target);
    Workspace workspace(plan.workspace_size + 64);
    BackwardProblem with_workspace = problem;
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    with_workspace.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
    with_workspace.workspace_size = plan.workspace_size;
    const Status status = run_backward(with_workspace, plan);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(workspace.guard_is_intact());
    for (const auto* t : {&dq, &dk, &dv}) EXPECT_EQ(t->damage(), "");
    return plan;
  }
};

struct Gradients {
  std::vector<double> dq, dk, dv;  // contiguous
};

// One row of a tensor as double.
std::vector<double> row_of(const BackwardProblem& p, const TensorView& t, int64_t b, int64_t s,
                           int64_t h) {
  std::vector<double> row(static_cast<size_t>(t.dim));
  for (int64_t d = 0; d < t.dim; ++d)
    row[static_cast<size_t>(d)] =
        load_float(t.data, p.dtype, b * t.stride_batch + s * t.stride_seq + h * t.stride_head + d);
  return row;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// The definition (flash3.h), pair by pair.
Gradients definition(const BackwardProblem& p) {
  Gradients g;
  const auto size = [](const TensorView& t) {
    return static_cast<size_t>(t.batch * t.seq * t.heads * t.dim);
  };
  g.dq.resize(size(p.dq)), g.dk.resize(size(p.dk)), g.dv.resize(size(p.dv));
  const auto at = [](std::vector<double>& v, const TensorView& t, int64_t b, int64_t s, int64_t h) {
    return v.data() + ((b * t.seq + s) * t.heads + h) * t.dim;
  };
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.heads_q; ++h) {
      const int64_t kv_head = h / p.queries_per_kv_head();
      std::vector<std::vector<double>> k, v;
      for (int64_t j = 0; j < p.seq_k; ++j) {
        k.push_back(row_of(p, p.k, b, j, kv_head));
        v.push_back(row_of(p, p.v, b, j, kv_head));
      }
      for (int64_t i = 0; i < p.seq_q; ++i) {
        const auto q = row_of(p, p.q, b, i, h), dout = row_of(p, p.dout, b, i, h);
        const double lse = p.lse.data[b * p.lse.stride_batch + h * p.lse.stride_head + i];
        if (lse == -kInf) continue;
        double delta = dot(dout, row_of(p, p.out, b, i, h));
        if (p.dlse.data) delta -= p.dlse.data[b * p.dlse.stride_batch + h * p.dlse.stride_head + i];
        double* dq = at(g.dq, p.dq, b, i, h);
        for (int64_t j = 0; j < p.seq_k; ++j) {
          if (!p.band.sees(i, j)) continue;
          const auto &key = k[static_cast<size_t>(j)], &value = v[static_cast<size_t>(j)];
          double *dk = at(g.dk, p.dk, b, j, kv_head), *dv = at(g.dv, p.dv, b, j, kv_head);
          const double weight = std::exp(double{p.softmax_scale} * dot(q, key) - lse);
          const double ds = double{p.softmax_scale} * weight * (dot(dout, value) - delta);
          for (size_t d = 0; d < key.size(); ++d) dq[d] += ds * key[d], dk[d] += ds * q[d];
          for (size_t d = 0; d < value.size(); ++d) dv[d] += weight * dout[d];
        }
      }
    }
  return g;
}

// What is wrong with t; "" if nothing is. Infinities and NaNs must agree, and what is 0 by
// definition must be 0 exactly.
std::string compare(const BackwardProblem& p, const TensorView& t,
                    const std::vector<double>& want) {
  double largest = 0;
  for (const double x : want)
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  const double unit = p.dtype == FLASH3_FLOAT32   ? 0x1p-24
                      : p.dtype == FLASH3_FLOAT16 ? 0x1p-11
                                                  : 0x1p-8;
  size_t n = 0;
  for (int64_t b = 0; b < t.batch; ++b)
    for (int64_t s = 0; s < t.seq; ++s)
      for (int64_t h = 0; h < t.heads; ++h)
        for (const double got : row_of(p, t, b, s, h)) {
          const double x = want[n++];
          const bool same = std::isfinite(x)
                                ? std::abs(got - x) <= unit * std::abs(x) + 1.5e-5 * largest &&
                                      (x != 0 || got == 0)
                                : !std::isfinite(got);
          if (!same)
            return "batch " + std::to_string(b) + ", row " + std::to_string(s) + ", head " +
                   std::to_string(h) + ": " + std::to_string(got) + ", not " + std::to_string(x) +
                   "; largest " + std::to_string(largest);
        }
  return "";
}

std::vector<CpuTarget> targets() {
  std::vector<CpuTarget> all;
  for (const CpuTarget target : supported_targets())
    if (target <= CpuTarget::kAvx3) all.push_back(target);
  return all;
}

void check(Backward& backward, int threads) {
  const BackwardProblem& p = backward.problem;
  const Gradients want = definition(p);
  for (const CpuTarget target : targets()) {
    SCOPED_TRACE(target_name(target));
    backward.run(target, threads);
    EXPECT_EQ(compare(p, p.dq, want.dq), "") << "dq";
    EXPECT_EQ(compare(p, p.dk, want.dk), "") << "dk";
    EXPECT_EQ(compare(p, p.dv, want.dv), "") << "dv";
  }
}

void check(const std::string& id, int threads) {
  SCOPED_TRACE(id + " on " + std::to_string(threads));
  Backward backward(id);
  check(backward, threads);
}

// Every two levels of every two factors meet.
TEST(Backward, MatchesTheDefinition) {
  const std::vector<std::string> dtypes{"fp32", "bf16", "fp16"},
      queries{"q0", "q1", "q2", "q6", "q7", "q63", "q97", "q200"},
      keys{"k0", "k1", "k2", "k15", "k64", "k65", "k129", "k400"},
      dims{"d1", "d8", "d33", "d64", "d72", "d128", "d72x1", "d1x72", "d96x64", "d31x255", "d256"},
      heads{"h1", "h3", "h4x2", "h6x2", "h5x1"},
      masks{"full", "causal", "w0:0", "w10:0", "w3:5", "w100:", "w:17", "w1000:1000"},
      layouts{"", "/bhsd", "/padded", "/odd"}, extras{"", "/outliers", "/scale0.5"};
  const std::vector<int> threads{1, 2, 3, 8};

  int cases = 0;
  const auto size = [](const auto& v) { return static_cast<int>(v.size()); };
  for (const auto& row :
       cases::pairwise({size(dtypes), size(queries), size(keys), size(dims), size(heads),
                        size(masks), size(layouts), size(extras), size(threads), 2})) {
    const auto pick = [&](const auto& v, int factor) {
      return v[static_cast<size_t>(row[factor])];
    };
    check(pick(dtypes, 0) + "/b" + std::to_string(row[9] + 1) + "/" + pick(queries, 1) + "/" +
              pick(keys, 2) + "/" + pick(heads, 4) + "/" + pick(dims, 3) + "/" + pick(masks, 5) +
              pick(layouts, 6) + pick(extras, 7),
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

TEST(Backward, WithoutAGradientOfLse) {
  Backward backward("fp32/b1/q70/k90/h2/d64/causal");
  backward.problem.dlse = {};
  check(backward, 1);
}

// Also for more threads than cores, where they wait for each other most.
TEST(Backward, SameBitsOnAnyNumberOfThreads) {
  for (const char* id : {"fp32/b2/q300/k900/h4x2/d64/causal", "bf16/b1/q700/k1300/h1/d128/full",
                         "fp16/b1/q500/k500/h1/d96/w200:0"}) {
    Backward backward(id);
    for (const CpuTarget target : targets()) {
      const int keys = backward.run(target, 1).tile.keys;
      const auto dq = backward.dq.bytes, dk = backward.dk.bytes, dv = backward.dv.bytes;
      for (const int threads : {1, 2, 3, 7, 16}) {
        const BackwardPlan plan = backward.run(target, threads);
        if (threads == 16) {
          EXPECT_LT(plan.tile.keys, keys) << id;
        }
        EXPECT_EQ(dq, backward.dq.bytes) << id << " " << target_name(target) << " " << threads;
        EXPECT_EQ(dk, backward.dk.bytes) << id << " " << target_name(target) << " " << threads;
        EXPECT_EQ(dv, backward.dv.bytes) << id << " " << target_name(target) << " " << threads;
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
        Backward backward(id, [&](const cases::ForwardTensors& t) {
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
      set(backward.forward.q.view, i, i % 64, kNaN);
      set(backward.dout.view, i, i % 64, kInf);
    }
    check(backward, 1);
  }
}

// All scores −∞: the row counts as masked, and K, though infinite, adds nothing to its gradient.
TEST(Backward, AllScoresMinusInfinity) {
  Backward backward("fp32/b1/q10/k30/h1/d1/full", [](const cases::ForwardTensors& t) {
    for (int64_t i = 0; i < 10; ++i) set(t.q.view, i, 0, 1.f);
    for (int64_t j = 0; j < 30; ++j) set(t.k.view, j, 0, -kInf);
  });
  check(backward, 1);
}

TEST(BackwardPlan, SmallCallsStayOnOneThreadAndLongOnesFillAll) {
  EXPECT_EQ(Backward("fp32/b1/q16/k16/h4/d64/full").run(CpuTarget::kBaseline, 64).threads, 1);
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
  EXPECT_EQ(bytes(65536) - bytes(32768), bytes(98304) - bytes(65536));
}

TEST(BackwardBackend, ExplainsAndRuns) {
  Backward backward("bf16/b1/q300/k300/h8x1/d128/causal");
  BackwardProblem& p = backward.problem;
  p.num_threads = 2;
  const Backend& cpu = cpu_backend();
  EXPECT_TRUE(cpu.supports(p).ok());
  Explanation explanation;
  cpu.explain(p, &explanation);
  const std::string text = explanation.text();
  for (const char* part : {"kernel: cpu_bwd_bf16_",
                           "\nwhy: ", "\ntile: ", "\ntasks: ", "\nrows: ", "\ndeterministic: "})
    EXPECT_NE(("\n" + text).find(part), std::string::npos) << part << " in\n" << text;
  EXPECT_NE(text.find("workspace: " + std::to_string(cpu.workspace_size(p)) + " bytes"),
            std::string::npos);
  EXPECT_FALSE(cpu.backward(p).ok());  // no workspace

  // One that is too small for two threads serves one.
  const Gradients want = definition(p);
  const BackwardPlan plan = plan_backward(p);
  ASSERT_EQ(plan.threads, 2);
  std::vector<double> workspace((plan.workspace_size - plan.scratch_size) / sizeof(double) + 8);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  p.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
  p.workspace_size = plan.workspace_size - plan.scratch_size;
  EXPECT_TRUE(cpu.backward(p).ok());
  EXPECT_EQ(compare(p, p.dq, want.dq), "");
  EXPECT_EQ(compare(p, p.dk, want.dk), "");
  EXPECT_EQ(compare(p, p.dv, want.dv), "");
}

}  // namespace
}  // namespace flash3::test
