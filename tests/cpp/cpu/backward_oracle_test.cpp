// SPDX-License-Identifier: Apache-2.0
// The oracle of the backward itself: gradients by hand, and against differences of the forward's
// oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../core/call.hpp"
#include "core/problem.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::test {
namespace {

BackwardProblem problem_of(const Backward& args) {
  const auto params = args.params();
  BackwardProblem problem;
  const Status status = make_backward_problem(&params, Pointers::kRequired, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

std::vector<float*> elements(const Tensor& t) {
  int64_t count = 1;
  for (int d = 0; d < t.ndim; ++d) count *= t.shape[d];
  std::vector<float*> all(static_cast<size_t>(count));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<float*>(t.data) + i;
  return all;
}

// The number whose gradient the backward computes: Σ dout·out + Σ dlse·lse, in float64.
double loss(const Backward& b) {
  const auto params = forward_of(b).params();
  ForwardProblem problem;
  EXPECT_TRUE(make_forward_problem(&params, Pointers::kRequired, &problem).ok());
  const ReferenceForward forward = attention_ref(problem, 1);
  double sum = 0;
  for (size_t i = 0; i < forward.out.size(); ++i)
    sum += double{static_cast<float*>(b.dout.data)[i]} * forward.out[i];
  if (b.dlse.data == nullptr) return sum;
  for (size_t i = 0; i < forward.lse.size(); ++i)
    if (std::isfinite(forward.lse[i]))  // a row that sees nothing has no gradient
      sum += double{static_cast<float*>(b.dlse.data)[i]} * forward.lse[i];
  return sum;
}

// d loss / d x from four points; the error is O(step⁴). x and the step are multiples of 2⁻²³, so
// that the float32 points lie exactly where they are meant to.
double slope(const Backward& b, float* x) {
  constexpr float kStep = 0x1p-9f;
  const float old = *x;
  const auto at = [&](float offset) {
    *x = old + offset;
    const double value = loss(b);
    *x = old;
    return value;
  };
  return (8 * (at(kStep) - at(-kStep)) - (at(2 * kStep) - at(-2 * kStep))) / (12 * double{kStep});
}

void expect_gradients_are_slopes(const Backward& args) {
  const ReferenceBackward ref = attention_backward_ref(problem_of(args));
  const struct {
    const char* name;
    const Tensor& input;
    const std::vector<double>& gradient;
  } all[] = {{"dq", args.q, ref.dq},
             {"dk", args.k, ref.dk},
             {"dv", args.v, ref.dv},
             {"dsink", args.sink, ref.dsink}};
  for (const auto& [name, input, gradient] : all) {
    if (!input.data) continue;
    const std::vector<float*> x = elements(input);
    ASSERT_EQ(x.size(), gradient.size());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_NEAR(gradient[i], slope(args, x[i]), 1e-9) << name << " element " << i;
  }
}

TEST(BackwardOracle, TwoKeysByHand) {
  BackwardCall call({1, 1, 2, 1, 1, 1, 1}, /*with_dlse=*/false);
  const auto set = [](const Tensor& t, std::vector<float> values) {
    std::copy(values.begin(), values.end(), static_cast<float*>(t.data));
  };
  set(call.args.q, {0.f});  // both probabilities are 1/2
  set(call.args.k, {3.f, 5.f});
  set(call.args.v, {1.f, 3.f});
  set(call.args.dout, {4.f});  // dp = 4, 12; its mean is 8; ds = -2, 2
  call.args.softmax_scale = 0.5f;
  ReferenceBackward ref = attention_backward_ref(problem_of(call.args));
  EXPECT_EQ(ref.dq, (std::vector<double>{0.5 * (-2 * 3 + 2 * 5)}));
  EXPECT_EQ(ref.dk, (std::vector<double>{0, 0}));
  EXPECT_EQ(ref.dv, (std::vector<double>{2, 2}));

  set(call.args.q, {1.f});
  const double e = std::exp(1.0), p = 1 / (1 + e);  // scores 1.5 and 2.5
  ref = attention_backward_ref(problem_of(call.args));
  const double ds = 8 * p * (1 - p);  // of the second key; −ds of the first
  EXPECT_NEAR(ref.dq[0], 0.5 * ds * 2, 1e-14);
  EXPECT_NEAR(ref.dk[0], -0.5 * ds, 1e-14);
  EXPECT_NEAR(ref.dk[1], 0.5 * ds, 1e-14);
  EXPECT_NEAR(ref.dv[0], 4 * p, 1e-14);

  call.args.dlse = lse_tensor(static_cast<float*>(call.args.lse.data), 1, 1, 1);
  set(call.args.dlse, {2.f});  // adds 2·p to ds
  ref = attention_backward_ref(problem_of(call.args));
  EXPECT_NEAR(ref.dk[0], 0.5 * (2 * p - ds), 1e-14);
  EXPECT_NEAR(ref.dq[0], 0.5 * (ds * 2 + 2 * (3 * p + 5 * (1 - p))), 1e-14);
  EXPECT_NEAR(ref.dv[0], 4 * p, 1e-14);
}

TEST(BackwardOracle, IsTheSlopeOfTheForward) {
  struct Mask {
    bool causal;
    std::optional<int64_t> left, right;
  };
  for (const Sizes& sizes : {Sizes{2, 5, 7, 4, 2, 6, 5}, Sizes{1, 9, 4, 3, 1, 3, 8}})
    for (const Mask& mask : {Mask{false, {}, {}}, Mask{true, {}, {}}, Mask{false, 2, 1},
                             Mask{true, 1, {}}, Mask{false, {}, 0}})
      for (const bool with_dlse : {false, true}) {
        BackwardCall call(sizes, with_dlse);
        call.args.causal = mask.causal;
        call.args.window_left = mask.left;
        call.args.window_right = mask.right;
        if (with_dlse) call.args.softmax_scale = 0.7f;
        SCOPED_TRACE(testing::Message()
                     << "seq_q " << sizes.seq_q << " causal " << mask.causal << " left "
                     << mask.left.value_or(-1) << " dlse " << with_dlse);
        expect_gradients_are_slopes(call.args);
      }
}

// More rows than go together, and more keys than a block of them.
TEST(BackwardOracle, IsTheSlopeOfTheForwardOverManyBlocks) {
  BackwardCall call({1, 21, 150, 1, 1, 2, 1});
  call.args.causal = true;
  expect_gradients_are_slopes(call.args);
}

// A sink by hand: three equal logits, one of them without a value.
TEST(BackwardOracle, SinkByHand) {
  BackwardCall call({1, 1, 2, 1, 1, 1, 1}, /*with_dlse=*/false);
  float sink = 0.f, dsink = 0.f, dlse = 3.f;
  const auto set = [](const Tensor& t, std::vector<float> values) {
    std::copy(values.begin(), values.end(), static_cast<float*>(t.data));
  };
  set(call.args.q, {0.f});
  set(call.args.v, {1.f, 2.f});  // out = 1
  set(call.args.dout, {6.f});
  call.args.sink = sink_tensor(&sink, FLASH3_FLOAT32, 1);
  call.args.dsink = sink_tensor(&dsink, FLASH3_FLOAT32, 1);
  EXPECT_NEAR(attention_backward_ref(problem_of(call.args)).dsink.at(0), -6 / 3.0, 1e-14);
  EXPECT_NEAR(attention_backward_ref(problem_of(call.args)).dv.at(0), 6 / 3.0, 1e-14);
  call.args.dlse = lse_tensor(&dlse, 1, 1, 1);
  EXPECT_NEAR(attention_backward_ref(problem_of(call.args)).dsink.at(0), (3 - 6) / 3.0, 1e-14);

  set(call.args.out, {1.f});
  attention_backward_naive(problem_of(call.args));
  EXPECT_NEAR(dsink, -1.f, 1e-6);
  sink = -std::numeric_limits<float>::infinity();  // as if there were none
  EXPECT_EQ(attention_backward_ref(problem_of(call.args)).dsink.at(0), 0.0);
  EXPECT_NEAR(attention_backward_ref(problem_of(call.args)).dv.at(0), 6 / 2.0, 1e-14);
}

TEST(BackwardOracle, IsTheSlopeOfTheForwardWithSinksSoftcapsAndChunks) {
  for (const Sizes& sizes : {Sizes{2, 5, 7, 4, 2, 6, 5}, Sizes{1, 9, 4, 3, 1, 3, 8}})
    for (const bool with_sink : {false, true})
      for (const float softcap : {0.f, 0.6f})
        for (const int64_t chunk : {0, 3})
          for (const bool causal : {false, true}) {
            BackwardCall call(sizes);
            std::vector<float> sink = {0.5f, -1.f, 0.f, 2.f};
            if (with_sink) call.args.sink = sink_tensor(sink.data(), FLASH3_FLOAT32, sizes.heads_q);
            call.args.softcap = softcap;
            call.args.chunk = chunk;
            call.args.causal = causal;
            if (causal) call.args.window_left = 2;
            SCOPED_TRACE(testing::Message()
                         << "seq_q " << sizes.seq_q << " sink " << with_sink << " softcap "
                         << softcap << " chunk " << chunk << " causal " << causal);
            expect_gradients_are_slopes(call.args);
          }
}

TEST(BackwardOracle, IsTheSlopeOfTheForwardInRaggedBatches) {
  RaggedCall call;
  unsigned random = 1;
  for (auto* values : {&call.q, &call.k, &call.v, &call.dout, &call.dlse, &call.sink})
    for (float& x : *values) {
      random = random * 1664525u + 1013904223u;
      x = static_cast<float>(random >> 8) / (1 << 23) - 1.f;
    }
  Backward args = call.backward();
  args.softcap = 0.6f;
  args.causal = true;
  for (const int64_t chunk : {0, 2}) {
    args.chunk = chunk;
    expect_gradients_are_slopes(args);
  }
}

TEST(BackwardOracle, WhatSeesNothingHasExactlyNoGradient) {
  BackwardCall call({1, 6, 4, 2, 1, 8, 8});
  call.args.causal = true;  // rows 0 and 1 lie before the first key
  ReferenceBackward ref = attention_backward_ref(problem_of(call.args));
  for (size_t i = 0; i < 2 * 2 * 8; ++i) EXPECT_EQ(ref.dq[i], 0.0);
  EXPECT_NE(ref.dv[0], 0.0);

  call.args.causal = false;
  call.args.window_left = -1, call.args.window_right = 0;
  call.args.q.shape[1] = call.args.dq.shape[1] = 2;
  call.args.out.shape[1] = call.args.dout.shape[1] = 2;
  call.args.lse.shape[2] = call.args.dlse.shape[2] = 2;
  call.args.window_left = 0;  // rows 0 and 1 see keys 2 and 3 alone
  ref = attention_backward_ref(problem_of(call.args));
  for (size_t i = 0; i < 2 * 8; ++i) EXPECT_EQ(ref.dk[i], 0.0);
  for (size_t i = 0; i < 2 * 8; ++i) EXPECT_EQ(ref.dv[i], 0.0);
  EXPECT_NE(ref.dv[2 * 8], 0.0);
}

TEST(BackwardOracle, EmptySequences) {
  BackwardCall no_keys({2, 3, 0, 4, 2, 8, 16});
  EXPECT_EQ(attention_backward_ref(problem_of(no_keys.args)).dq,
            std::vector<double>(no_keys.dq.size(), 0.0));
  BackwardCall no_queries({2, 0, 5, 4, 2, 8, 16});
  const ReferenceBackward ref = attention_backward_ref(problem_of(no_queries.args));
  EXPECT_EQ(ref.dk, std::vector<double>(no_queries.dk.size(), 0.0));
  EXPECT_EQ(ref.dv, std::vector<double>(no_queries.dv.size(), 0.0));
  attention_backward_naive(problem_of(no_queries.args));
  EXPECT_EQ(no_queries.dk, std::vector<float>(no_queries.dk.size(), 0.f));
}

// Only what a row sees counts, also for values that are not finite.
TEST(BackwardOracle, MaskedValuesDoNotCount) {
  BackwardCall call({1, 8, 8, 1, 1, 4, 4});
  call.args.causal = true;
  const ReferenceBackward clean = attention_backward_ref(problem_of(call.args));
  for (int d = 0; d < 4; ++d)
    static_cast<float*>(call.args.k.data)[5 * 4 + d] = std::numeric_limits<float>::quiet_NaN();
  const ReferenceBackward ref = attention_backward_ref(problem_of(call.args));
  for (size_t i = 0; i < 8 * 4; ++i) {
    if (i < 5 * 4)
      EXPECT_EQ(ref.dq[i], clean.dq[i]);
    else
      EXPECT_TRUE(std::isnan(ref.dq[i]));
  }
  EXPECT_FALSE(std::isnan(clean.dk[7 * 4]));
}

// The naive implementation in float32 is near the oracle, and not nearer than float32 is.
TEST(BackwardNaive, Float32IsNear) {
  BackwardCall call({2, 40, 70, 4, 2, 24, 16});
  call.args.causal = true;
  call.run_forward();
  const BackwardProblem problem = problem_of(call.args);
  attention_backward_naive(problem);
  const ReferenceBackward ref = attention_backward_ref(problem);
  const auto error = [](const std::vector<float>& got, const std::vector<double>& want) {
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i)
      worst = std::max(worst, std::abs(double{got[i]} - want[i]));
    return worst;
  };
  for (const double e : {error(call.dq, ref.dq), error(call.dk, ref.dk), error(call.dv, ref.dv)}) {
    EXPECT_GT(e, 1e-9);
    EXPECT_LT(e, 2e-6);
  }
}

}  // namespace
}  // namespace flash3::test
