// SPDX-License-Identifier: Apache-2.0
// The oracle itself: values computed by hand, and identities that it does not compute by.
#include <cmath>
#include <limits>

#include "core/convert.hpp"
#include "flash3/flash3.hpp"
#include "harness.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// One batch, one head, float32, contiguous.
struct Small {
  int64_t seq_q, seq_k, dim, dim_v;
  std::vector<float> q, k, v, out, lse;
  flash3_forward_params params{};

  Small(int64_t queries, int64_t keys, int64_t head_dim, int64_t head_dim_v)
      : seq_q(queries),
        seq_k(keys),
        dim(head_dim),
        dim_v(head_dim_v),
        q(static_cast<size_t>(seq_q * dim)),
        k(static_cast<size_t>(seq_k * dim)),
        v(static_cast<size_t>(seq_k * dim_v)),
        out(static_cast<size_t>(seq_q * dim_v)),
        lse(static_cast<size_t>(seq_q)) {
    params.struct_size = sizeof params;
  }
  static flash3_tensor view(std::vector<float>& data, int64_t seq, int64_t last) {
    return {data.data(), FLASH3_FLOAT32, 4, {1, seq, 1, last}, {seq * last, last, last, 1}};
  }
  ForwardProblem problem() {
    params.q = view(q, seq_q, dim);
    params.k = view(k, seq_k, dim);
    params.v = view(v, seq_k, dim_v);
    params.out = view(out, seq_q, dim_v);
    params.lse = {lse.data(), FLASH3_FLOAT32, 3, {1, 1, seq_q, 0}, {seq_q, seq_q, 1, 0}};
    return to_problem(params);
  }
  void fill(uint64_t seed) {
    uint64_t i = 0;
    for (auto* t : {&q, &k, &v})
      for (float& x : *t) x = cases::normal_value(seed, i++);
  }
};

TEST(Oracle, TwoKeysByHand) {
  Small s(1, 2, 1, 2);
  s.q = {2.f};
  s.k = {1.f, 0.f};
  s.v = {10.f, 0.f, 0.f, 100.f};
  s.params.softmax_scale = 0.5f;  // scores 1 and 0
  const ReferenceForward r = attention_ref(s.problem());
  const double e = std::exp(1.0);
  EXPECT_NEAR(r.out[0], 10 * e / (e + 1), 1e-14);
  EXPECT_NEAR(r.out[1], 100 / (e + 1), 1e-13);
  EXPECT_NEAR(r.lse[0], std::log(e + 1), 1e-15);
}

// Equal scores: the mean of what a row sees. Bottom-right: the last row sees the last key.
TEST(Oracle, CausalMeansByHand) {
  Small s(3, 4, 1, 1);
  s.v = {1.f, 2.f, 4.f, 8.f};
  s.params.causal = 1;
  const ReferenceForward r = attention_ref(s.problem());
  EXPECT_DOUBLE_EQ(r.out[0], 1.5);
  EXPECT_DOUBLE_EQ(r.out[1], 7.0 / 3);
  EXPECT_DOUBLE_EQ(r.out[2], 3.75);
  EXPECT_DOUBLE_EQ(r.lse[0], std::log(2.0));
  EXPECT_DOUBLE_EQ(r.lse[2], std::log(4.0));
}

TEST(Oracle, WindowByHand) {
  Small s(4, 4, 1, 1);
  s.v = {1.f, 2.f, 4.f, 8.f};
  s.params.window = 1;
  s.params.window_left = 1;
  s.params.window_right = 0;
  const ReferenceForward r = attention_ref(s.problem());
  EXPECT_DOUBLE_EQ(r.out[0], 1.0);
  EXPECT_DOUBLE_EQ(r.out[1], 1.5);
  EXPECT_DOUBLE_EQ(r.out[3], 6.0);
}

TEST(Oracle, RowsThatSeeNothing) {
  Small s(3, 1, 2, 2);
  s.fill(1);
  s.params.causal = 1;  // rows 0 and 1 lie before the only key
  const ReferenceForward r = attention_ref(s.problem());
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(r.out[i], 0.0);
  EXPECT_EQ(r.lse[0], -kInf);
  EXPECT_EQ(r.lse[1], -kInf);
  EXPECT_EQ(r.out[4], static_cast<double>(s.v[0]));
}

TEST(Oracle, NoKeys) {
  Small s(2, 0, 3, 4);
  s.fill(1);
  const ReferenceForward r = attention_ref(s.problem());
  EXPECT_EQ(r.out, std::vector<double>(8, 0.0));
  EXPECT_EQ(r.lse, std::vector<double>(2, -kInf));
}

// Logits 1, 0 and 2, of which the last one has no value.
TEST(Oracle, SinkByHand) {
  Small s(1, 2, 1, 1);
  s.q = {1.f};
  s.k = {1.f, 0.f};
  s.v = {10.f, 100.f};
  s.params.softmax_scale = 1.f;
  float sink = 2.f;
  s.params.sink = sink_tensor(&sink, FLASH3_FLOAT32, 1);
  const double sum = std::exp(1.0) + 1 + std::exp(2.0);
  ReferenceForward r = attention_ref(s.problem());
  EXPECT_NEAR(r.out[0], (10 * std::exp(1.0) + 100) / sum, 1e-13);
  EXPECT_NEAR(r.lse[0], std::log(sum), 1e-14);

  s.params.window = 1, s.params.window_left = 0, s.params.window_right = -1;
  sink = -std::numeric_limits<float>::infinity();  // as if there were none
  r = attention_ref(s.problem());
  EXPECT_EQ(r.out[0], 100.0);
  EXPECT_EQ(r.lse[0], 0.0);
}

TEST(Oracle, SinkOfARowThatSeesNothing) {
  Small s(2, 1, 2, 2);
  s.fill(1);
  s.params.causal = 1;  // row 0 lies before the only key
  float sink = -3.5f;
  s.params.sink = sink_tensor(&sink, FLASH3_FLOAT32, 1);
  const ReferenceForward r = attention_ref(s.problem());
  EXPECT_EQ(r.out[0], 0.0);
  EXPECT_EQ(r.lse[0], -3.5);
  EXPECT_GT(r.lse[1], -3.5);
}

TEST(Oracle, SoftcapByHand) {
  Small s(1, 2, 1, 1);
  s.q = {4.f};
  s.k = {3.f, -1.f};
  s.v = {1.f, 0.f};
  s.params.softmax_scale = 0.5f;  // scores 6 and -2
  s.params.softcap = 2.f;
  const double a = 2 * std::tanh(3.0), b = 2 * std::tanh(-1.0);
  const ReferenceForward r = attention_ref(s.problem());
  EXPECT_NEAR(r.lse[0], std::log(std::exp(a) + std::exp(b)), 1e-14);
  EXPECT_NEAR(r.out[0], 1 / (1 + std::exp(b - a)), 1e-14);
}

// i' = i + 2: rows stand for keys 2, 3 and 4; chunks are keys 0 … 2 and 3 … 4.
TEST(Oracle, ChunksByHand) {
  Small s(3, 5, 1, 1);
  s.v = {1.f, 2.f, 4.f, 8.f, 16.f};
  s.params.chunk = 3;
  ReferenceForward r = attention_ref(s.problem());
  EXPECT_DOUBLE_EQ(r.out[0], 7.0 / 3);
  EXPECT_DOUBLE_EQ(r.out[1], 12.0);
  EXPECT_DOUBLE_EQ(r.out[2], 12.0);
  s.params.causal = 1;
  r = attention_ref(s.problem());
  EXPECT_DOUBLE_EQ(r.out[0], 7.0 / 3);
  EXPECT_DOUBLE_EQ(r.out[1], 8.0);
  EXPECT_DOUBLE_EQ(r.out[2], 12.0);
}

// Each sequence of a ragged batch is what it is alone, in tensors of its own; rows of no token stay
// 0, and nothing is read there.
TEST(Oracle, RaggedSequencesAreAsAlone) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr int64_t kDim = 4, kDimV = 3;
  const std::vector<int32_t> cu_q = {1, 4, 4, 9}, cu_k = {0, 2, 7, 13}, used_k = {2, 0, 5};
  std::vector<float> q(10 * kDim, kNaN), k(14 * kDim, kNaN), v(14 * kDimV, kNaN);
  std::vector<float> out(10 * kDimV), lse(10);
  uint64_t n = 0;
  std::vector<double> want_out(10 * kDimV), want_lse(10);
  for (size_t b = 0; b < 3; ++b) {
    Small alone(cu_q[b + 1] - cu_q[b], used_k[b], kDim, kDimV);
    alone.fill(++n);
    alone.params.causal = 1;
    const ReferenceForward r = attention_ref(alone.problem());
    std::copy(alone.q.begin(), alone.q.end(), q.begin() + cu_q[b] * kDim);
    std::copy(alone.k.begin(), alone.k.end(), k.begin() + cu_k[b] * kDim);
    std::copy(alone.v.begin(), alone.v.end(), v.begin() + cu_k[b] * kDimV);
    std::copy(r.out.begin(), r.out.end(), want_out.begin() + cu_q[b] * kDimV);
    std::copy(r.lse.begin(), r.lse.end(), want_lse.begin() + cu_q[b]);
  }
  const Forward call{.q = packed_tensor(q.data(), FLASH3_FLOAT32, {10, 1, kDim}),
                     .k = packed_tensor(k.data(), FLASH3_FLOAT32, {14, 1, kDim}),
                     .v = packed_tensor(v.data(), FLASH3_FLOAT32, {14, 1, kDimV}),
                     .out = packed_tensor(out.data(), FLASH3_FLOAT32, {10, 1, kDimV}),
                     .lse = packed_lse_tensor(lse.data(), 1, 10),
                     .causal = true,
                     .cu_seqlens_q = index_tensor(cu_q.data(), 4),
                     .cu_seqlens_k = index_tensor(cu_k.data(), 4),
                     .seqused_k = index_tensor(used_k.data(), 3)};
  const ForwardProblem problem = to_problem(call.params());
  const ReferenceForward r = attention_ref(problem);
  EXPECT_EQ(r.out, want_out);
  EXPECT_EQ(r.lse, want_lse);
  attention_naive(problem);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], want_out[i], 1e-6) << i;
}

// V = 1, 2, 4… in its own column per key: outputs are the probabilities. They sum to 1, and each is
// exp(score − lse).
TEST(Oracle, ProbabilitiesSumToOne) {
  Small s(37, 61, 19, 61);
  s.fill(3);
  std::fill(s.v.begin(), s.v.end(), 0.f);
  for (size_t j = 0; j < 61; ++j) s.v[j * 61 + j] = 1.f;
  for (const int causal : {0, 1}) {
    s.params.causal = causal;
    const ForwardProblem problem = s.problem();
    const ReferenceForward r = attention_ref(problem);
    for (size_t i = 0; i < 37; ++i) {
      double sum = 0;
      for (size_t j = 0; j < 61; ++j) {
        double score = 0;
        for (size_t d = 0; d < 19; ++d) score += double{s.q[i * 19 + d]} * double{s.k[j * 19 + d]};
        const bool seen = !causal || j <= i + (61 - 37);
        const double want = seen ? std::exp(score * double{problem.softmax_scale} - r.lse[i]) : 0;
        EXPECT_NEAR(r.out[i * 61 + j], want, 1e-13);
        sum += r.out[i * 61 + j];
      }
      EXPECT_NEAR(sum, 1.0, 1e-13);
    }
  }
}

// d lse / d q = scale · Σ p·k: the gradient of lse is the attention over V = K. By central
// differences.
TEST(Oracle, GradientOfLse) {
  Small s(5, 40, 8, 8);
  s.fill(5);
  s.v = s.k;
  s.params.causal = 1;
  const ForwardProblem problem = s.problem();
  const ReferenceForward r = attention_ref(problem);
  for (size_t i = 0; i < 5; ++i) {
    for (size_t d = 0; d < 8; ++d) {
      const float x = s.q[i * 8 + d], above = x + 0x1p-12f, below = x - 0x1p-12f;
      s.q[i * 8 + d] = above;
      const double up = attention_ref(s.problem()).lse[i];
      s.q[i * 8 + d] = below;
      const double down = attention_ref(s.problem()).lse[i];
      s.q[i * 8 + d] = x;
      const double slope = (up - down) / (double{above} - double{below});
      EXPECT_NEAR(slope, double{problem.softmax_scale} * r.out[i * 8 + d], 1e-6);
    }
  }
}

// Only what a row sees counts, also for values that are not finite.
TEST(Oracle, MaskedValuesDoNotCount) {
  Small s(8, 8, 4, 4);
  s.fill(6);
  s.params.causal = 1;
  const ReferenceForward clean = attention_ref(s.problem());
  for (size_t d = 0; d < 4; ++d) {
    s.v[5 * 4 + d] = std::numeric_limits<float>::infinity();
    s.k[5 * 4 + d] = std::numeric_limits<float>::quiet_NaN();
  }
  const ReferenceForward r = attention_ref(s.problem());
  for (size_t i = 0; i < 8; ++i) {
    for (size_t d = 0; d < 4; ++d) {
      if (i < 5) {
        EXPECT_EQ(r.out[i * 4 + d], clean.out[i * 4 + d]);
      } else {
        EXPECT_TRUE(std::isnan(r.out[i * 4 + d]));
      }
    }
    EXPECT_EQ(std::isnan(r.lse[i]), i >= 5);
  }
}

// Strides, batch, GQA and threads change nothing.
TEST(Oracle, LayoutAndThreadsChangeNothing) {
  std::string error;
  const auto plain = cases::parse_id("bf16/b2/q33/k70/h6x2/d24x40/causal", &error);
  const auto odd = cases::parse_id("bf16/b2/q33/k70/h6x2/d24x40/causal/odd", &error);
  ASSERT_TRUE(plain && odd) << error;
  const auto run = [](const cases::Case& c, int threads) {
    const auto t = cases::make_forward_tensors(c);
    return attention_ref(
        to_problem(cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view)),
        threads);
  };
  const ReferenceForward a = run(*plain, 1), b = run(*odd, 4);
  EXPECT_EQ(a.out, b.out);
  EXPECT_EQ(a.lse, b.lse);
}

// The naive implementation is as far from the oracle as its precision says, and not nearer: the
// yardstick has a length.
TEST(Naive, ErrorIsThatOfItsPrecision) {
  for (const auto& [dtype, low, high] :
       {std::tuple{"fp32", 1e-9, 3e-6}, std::tuple{"bf16", 1e-4, 3e-2},
        std::tuple{"fp16", 1e-5, 4e-3}}) {
    std::string error;
    const auto c = cases::parse_id(std::string(dtype) + "/b1/q100/k300/h2/d64/causal", &error);
    ASSERT_TRUE(c) << error;
    const auto t = cases::make_forward_tensors(*c);
    const auto problem =
        to_problem(cases::make_params(*c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view));
    attention_naive(problem);
    const ReferenceForward ref = attention_ref(problem);
    double error_out = 0;
    for (size_t i = 0; i < ref.out.size(); ++i)
      error_out = std::max(
          error_out,
          std::abs(double{load_float(t.out.view.data, c->dtype, int64_t(i))} - ref.out[i]));
    EXPECT_GT(error_out, low) << dtype;
    EXPECT_LT(error_out, high) << dtype;
  }
}

}  // namespace
}  // namespace flash3::test
