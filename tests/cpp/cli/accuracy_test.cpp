// SPDX-License-Identifier: Apache-2.0
// The accuracy experiment must fail what computes less exactly than it could: a small model of a
// fused kernel, with one mistake at a time.
#include "cases/accuracy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <vector>

#include "../parsed.hpp"
#include "cases/runner.hpp"
#include "core/convert.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::cases {
namespace {

enum class Mistake {
  kNone,
  kScoresIn16Bits,
  kRowSumIn16Bits,
  kRowSumOfRounded,  // the sum takes the probabilities as they are multiplied, not as computed
  kCoarseExp2,       // 8 bits
  kOutputCutOff,     // instead of rounded
};

float rounded(float x, flash3_dtype dtype) {
  uint32_t element = 0;
  store_float(&element, dtype, 0, x);
  return load_float(&element, dtype, 0);
}

// The neighbour of x towards zero among the numbers of dtype, or x.
float cut_off(float x, flash3_dtype dtype) {
  const float near = rounded(x, dtype);
  if (std::abs(near) <= std::abs(x)) return near;
  uint32_t element = 0;
  store_float(&element, dtype, 0, near);
  --element;  // sign and magnitude: one step towards zero
  return load_float(&element, dtype, 0);
}

float with_8_bits(float x) {
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

class Accuracy : public testing::TestWithParam<flash3_dtype> {
 protected:
  void SetUp() override {
    case_.dtype = GetParam();
    case_.seq_q = 256, case_.seq_k = 512;
    case_.causal = true;
    case_.distribution = Distribution::kOutliers;
    tensors_ = make_forward_tensors(case_);
    const auto params = make_params(case_, tensors_.q.view, tensors_.k.view, tensors_.v.view,
                                    tensors_.out.view, tensors_.lse.view);
    ASSERT_TRUE(make_forward_problem(&params, Pointers::kRequired, &problem_).ok());
    ref_ = attention_ref(problem_);
    attention_naive(problem_);  // into out; the model has its own
  }

  // What the tensor-core kernel computes: float32 but for the probabilities that multiply V, which
  // are relative to the row's maximum, and the output. One head, contiguous.
  TensorCheck score_of_model(Mistake mistake) const {
    const flash3_dtype dtype = case_.dtype;
    const int64_t dim = case_.head_dim;
    const GuardedTensor out = make_tensor(dtype, 1, case_.seq_q, 1, dim, Layout::kBatchSeq);
    const auto dot = [&](int64_t i, int64_t j) {
      float sum = 0;
      for (int64_t d = 0; d < dim; ++d)
        sum += load_float(tensors_.q.view.data, dtype, i * dim + d) *
               load_float(tensors_.k.view.data, dtype, j * dim + d);
      return sum;
    };
    for (int64_t i = 0; i < case_.seq_q; ++i) {
      const int64_t keys = i + 1 + case_.seq_k - case_.seq_q;
      std::vector<float> scores, o(static_cast<size_t>(dim));
      for (int64_t j = 0; j < keys; ++j) {
        const float s = dot(i, j) * problem_.softmax_scale;
        scores.push_back(mistake == Mistake::kScoresIn16Bits ? rounded(s, dtype) : s);
      }
      const float max = *std::max_element(scores.begin(), scores.end());
      float sum = 0;
      for (int64_t j = 0; j < keys; ++j) {
        float p = std::exp2((scores[size_t(j)] - max) * std::numbers::log2e_v<float>);
        if (mistake == Mistake::kCoarseExp2) p = with_8_bits(p);
        const float p16 = rounded(p, dtype);
        sum += mistake == Mistake::kRowSumOfRounded ? p16 : p;
        if (mistake == Mistake::kRowSumIn16Bits) sum = rounded(sum, dtype);
        for (int64_t d = 0; d < dim; ++d)
          o[size_t(d)] += p16 * load_float(tensors_.v.view.data, dtype, j * dim + d);
      }
      for (int64_t d = 0; d < dim; ++d) {
        const float x = o[size_t(d)] / sum;
        store_float(out.view.data, dtype, i * dim + d,
                    mistake == Mistake::kOutputCutOff ? cut_off(x, dtype) : x);
      }
    }
    return check_out(out.view, ref_, {}, tensors_.out.view);
  }

  Case case_;
  ForwardTensors tensors_;
  ForwardProblem problem_;
  ReferenceForward ref_;
};

INSTANTIATE_TEST_SUITE_P(Dtypes, Accuracy, testing::Values(FLASH3_FLOAT16, FLASH3_BFLOAT16),
                         [](const auto& test) { return std::string(short_name(test.param)); });

TEST_P(Accuracy, PassesAFusedKernel) {
  const TensorCheck score = score_of_model(Mistake::kNone);
  EXPECT_EQ(score.failure, "");
  EXPECT_EQ(check_accuracy(score), "");
  EXPECT_GT(score.rmse, 0.2 * score.naive_rmse);  // it rounds twice; less would be another model
}

TEST_P(Accuracy, FailsScoresKeptIn16Bits) {
  const TensorCheck score = score_of_model(Mistake::kScoresIn16Bits);
  EXPECT_NE(score.failure, "");
  EXPECT_NE(check_accuracy(score).find("the plain implementation's"), std::string::npos);
}

TEST_P(Accuracy, FailsRowSumsKeptIn16Bits) {
  EXPECT_NE(check_accuracy(score_of_model(Mistake::kRowSumIn16Bits)), "");
}

TEST_P(Accuracy, FailsAnOutputThatIsCutOff) {
  EXPECT_NE(check_accuracy(score_of_model(Mistake::kOutputCutOff)), "");
}

// An exp2 of 8 bits is as exact as a probability in bfloat16 can be.
TEST_P(Accuracy, FailsACoarseExp2WhereItCostsAccuracy) {
  const TensorCheck score = score_of_model(Mistake::kCoarseExp2);
  EXPECT_EQ(check_accuracy(score).empty(), GetParam() == FLASH3_BFLOAT16) << score.rmse;
}

// Numerator and denominator then share the rounding: no worse, so it must not fail.
TEST_P(Accuracy, PassesRowSumsOfRoundedProbabilities) {
  const TensorCheck sound = score_of_model(Mistake::kNone);
  const TensorCheck score = score_of_model(Mistake::kRowSumOfRounded);
  EXPECT_EQ(check_accuracy(score), "");
  EXPECT_NEAR(score.rmse / sound.rmse, 1, 0.05);
  EXPECT_NE(score.rmse, sound.rmse);
}

TensorCheck score_of(double rmse, double naive_rmse) {
  TensorCheck score;
  score.rmse = rmse, score.naive_rmse = naive_rmse;
  return score;
}

TEST(AccuracyBar, IsTheRatioOfThePaper) {
  EXPECT_EQ(check_accuracy(score_of(0.59, 1)), "");
  EXPECT_EQ(check_accuracy(score_of(0.591, 1)),
            "out: RMSE 0.591 > 0.59 x 1, the plain implementation's");
  EXPECT_NE(check_accuracy(score_of(std::nan(""), 1)), "");
}

TEST(AccuracyBar, NeedsAnErrorToCompareWith) {
  EXPECT_NE(check_accuracy(score_of(0, 0)).find("nothing to compare with"), std::string::npos);
  EXPECT_NE(check_accuracy(score_of(0, std::nan(""))), "");
}

TEST(AccuracyCases, AreThoseThatTheBarIsFor) {
  for (const Level level : {Level::kQuick, Level::kFull}) {
    std::set<std::string> ids;
    for (const Case& c : accuracy_cases(level)) {
      EXPECT_EQ(accuracy_objection(c), "") << to_id(c);
      ids.insert(to_id(c));
    }
    EXPECT_EQ(ids.size(), 12u);  // 2 dtypes, 3 head dims, 2 masks
    EXPECT_TRUE(ids.contains(level == Level::kQuick
                                 ? "bf16/b1/q1024/k1024/h2/d256/causal/outliers"
                                 : "bf16/b1/q4096/k4096/h2/d256/causal/outliers"));
  }
}

TEST(AccuracyCases, OfEachLength) {
  const auto list = accuracy_cases(Level::kFull, {300, 77});
  ASSERT_EQ(list.size(), 24u);
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(list[i].seq_q, i < 12 ? 300 : 77);
    EXPECT_EQ(list[i].seq_k, list[i].seq_q);
  }
}

TEST(AccuracyCases, ObjectionsNameTheFieldTheValueAndTheRule) {
  Case c = accuracy_cases(Level::kQuick).front();
  c.dtype = FLASH3_FLOAT32;
  EXPECT_NE(accuracy_objection(c).find("dtype = fp32, but the accuracy experiment is for fp16 and"),
            std::string::npos);
  c = accuracy_cases(Level::kQuick).front();
  c.distribution = Distribution::kNormal;
  EXPECT_NE(accuracy_objection(c).find("data = normal, but"), std::string::npos);
}

Fp8Accuracy measured(const std::string& id, int64_t most) {
  const Case c = parsed(id);
  const ForwardTensors t = make_forward_tensors(c);
  HostMemory memory;
  return measure_fp8_accuracy(make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, {}), memory,
                              FLASH3_BACKEND_CPU, 0, most);
}

// What the rotation is for; and rows by themselves tell what all do.
TEST(Fp8Accuracy, RotationHelpsAndSomeRowsTellAll) {
  for (const char* id :
       {"bf16/b1/q640/k640/h2/d128/full/outliers", "fp16/b2/q640/k640/h2x1/d128/causal/outliers"}) {
    const Fp8Accuracy all = measured(id, 640), some = measured(id, 320);
    EXPECT_EQ(check_fp8_accuracy(all, Fp8Demand::kOwn), "") << id;
    EXPECT_EQ(all.rows, 640);
    EXPECT_EQ(some.rows, 64);
    EXPECT_LT(all.half, 0.05 * all.rmse[3]);
    EXPECT_LT(all.rmse[3], 0.9 * all.rmse[0]);
    EXPECT_LT(all.rmse[0], 1.01 * all.plain);
    EXPECT_GT(some.plain, 0.3 * all.plain) << id;
    EXPECT_LT(some.plain, 3 * all.plain) << id;
    for (size_t way = 0; way < kFp8Ways.size(); ++way) {
      EXPECT_GT(some.rmse[way], 0.3 * all.rmse[way]) << id;
      EXPECT_LT(some.rmse[way], 3 * all.rmse[way]) << id;
    }
    EXPECT_LT(some.half, 3 * all.half);
  }
}

TEST(Fp8Accuracy, Check) {
  Fp8Accuracy a;
  a.rms = 0.2;
  a.rmse = {2e-2, 2e-2, 1e-2, 1e-2};
  EXPECT_EQ(check_fp8_accuracy(a, Fp8Demand::kOwn), "");
  EXPECT_EQ(check_fp8_accuracy(a, Fp8Demand::kPaper), "RMSE 0.01 > 0.0091, the paper's");
  a.rms = 0.1;
  EXPECT_EQ(check_fp8_accuracy(a, Fp8Demand::kOwn), "RMSE 0.01 > 0.08 of out's RMS");
  a.rmse[0] = 9e-3;
  EXPECT_EQ(check_fp8_accuracy(a, Fp8Demand::kOwn),
            "RMSE 0.01 with blocks and rotation > 0.009 without");
  EXPECT_EQ(check_fp8_accuracy(a, Fp8Demand::kNone), "");
  a.failure = "why";
  EXPECT_EQ(check_fp8_accuracy(a, Fp8Demand::kOwn), "why");
}

}  // namespace
}  // namespace flash3::cases
