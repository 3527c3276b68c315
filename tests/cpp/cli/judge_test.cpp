// The judge must fail what is wrong: every kind of mistake is made once, on purpose.
#include "cases/judge.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cases/runner.hpp"
#include "core/convert.hpp"
#include "faulty_memory.hpp"

namespace flash3::cases {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

class Judge : public testing::Test {
 protected:
  static constexpr int64_t kSeq = 3, kHeads = 2, kDim = 4;
  GuardedTensor got_ = make_tensor(FLASH3_BFLOAT16, 1, kSeq, kHeads, kDim, Layout::kPadded);
  GuardedTensor naive_ = make_tensor(FLASH3_BFLOAT16, 1, kSeq, kHeads, kDim, Layout::kBatchSeq);
  ReferenceForward reference_{std::vector<double>(kSeq * kHeads * kDim, 1.0),
                              std::vector<double>(kSeq* kHeads, 0.0)};
  std::vector<double>& ref_ = reference_.out;

  void SetUp() override {
    for (int64_t i = 0; i < static_cast<int64_t>(ref_.size()); ++i)
      set(got_, i, 1.0f), set(naive_, i, 1.0f);
  }
  // Element i in [seq, heads, dim] order.
  static void set(const GuardedTensor& t, int64_t i, float x) {
    store_float(
        t.view.data, t.view.dtype,
        i / (kHeads * kDim) * t.view.stride[1] + i / kDim % kHeads * t.view.stride[2] + i % kDim,
        x);
  }
  Score score() const { return judge_out(got_.view, naive_.view, reference_); }
};

TEST_F(Judge, PassesWhatIsRight) {
  EXPECT_EQ(score().failure, "");
  EXPECT_EQ(score().error, 0);
}

TEST_F(Judge, AllowsTwiceTheNaiveErrorAndOneRounding) {
  set(naive_, 0, 1.25f);
  set(got_, 5, 1.5f);
  EXPECT_EQ(score().failure, "");
  EXPECT_DOUBLE_EQ(score().allowed, 2 * 0.25 + 0x1p-8);
  set(got_, 5, 1.515625f);
  const std::string failure = score().failure;
  EXPECT_NE(failure.find("out[0, 0, 1, 1]: got 1.515625, ref 1, naive 1"), std::string::npos)
      << failure;
}

TEST_F(Judge, AllowsOneFloat32RoundingOfTheLargestScore) {
  reference_.lse[2] = -64;
  reference_.lse[3] = -kInf;  // a row without keys has no score
  EXPECT_DOUBLE_EQ(score().allowed, 0x1p-8 + 64 * 0x1p-24);
}

TEST_F(Judge, RmseIsOverFiniteElements) {
  ref_[0] = kInf;
  set(got_, 0, std::numeric_limits<float>::infinity());
  set(got_, 5, 1.5f), set(got_, 6, 0.f);
  set(naive_, 5, 1.25f);
  EXPECT_DOUBLE_EQ(score().rmse, std::sqrt((0.5 * 0.5 + 1) / (kSeq * kHeads * kDim - 1)));
  EXPECT_DOUBLE_EQ(score().naive_rmse, 0.25 / std::sqrt(kSeq * kHeads * kDim - 1));
}

TEST_F(Judge, SeesAnElementThatWasNotWritten) {
  got_ = make_tensor(FLASH3_BFLOAT16, 1, kSeq, kHeads, kDim, Layout::kPadded);
  for (int64_t i = 0; i + 1 < static_cast<int64_t>(ref_.size()); ++i) set(got_, i, 1.0f);
  ref_.back() = kNaN;  // even where a NaN belongs
  EXPECT_NE(score().failure.find("out was not written: [0, 2, 1, 3]"), std::string::npos)
      << score().failure;
}

TEST_F(Judge, WantsInfinitiesAndNaNsInTheirPlaces) {
  const float inf = std::numeric_limits<float>::infinity();
  ref_[3] = kInf, ref_[4] = -kInf, ref_[5] = kNaN;
  set(got_, 3, inf), set(got_, 4, -inf), set(got_, 5, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(score().failure, "");
  set(got_, 4, inf);
  EXPECT_NE(score().failure, "");
  set(got_, 4, -inf);
  set(got_, 5, 1);
  EXPECT_NE(score().failure, "");
  set(got_, 5, inf);
  EXPECT_NE(score().failure, "");
  ref_[5] = 1;
  EXPECT_NE(score().failure, "");
}

TEST_F(Judge, LseHasItsOwnTolerance) {
  const auto got = make_lse(1, 1, 2, Layout::kPadded), naive = make_lse(1, 1, 2, Layout::kBatchSeq);
  auto* g = static_cast<float*>(got.view.data);
  auto* n = static_cast<float*>(naive.view.data);
  n[0] = 8, n[1] = -std::numeric_limits<float>::infinity();
  g[0] = 8 + 0x1p-15f, g[1] = n[1];
  EXPECT_EQ(judge_lse(got.view, naive.view, {{}, {8, -kInf}}).failure, "");
  g[0] = 8 + 0x1p-13f;
  EXPECT_NE(judge_lse(got.view, naive.view, {{}, {8, -kInf}}).failure, "");
  g[0] = 8, g[1] = -1000;
  EXPECT_NE(judge_lse(got.view, naive.view, {{}, {8, -kInf}}).failure, "");
}

TEST(Guard, FindsAByteOutsideTheElements) {
  for (const Layout layout :
       {Layout::kBatchSeq, Layout::kHeadsFirst, Layout::kPadded, Layout::kOdd}) {
    auto t = make_tensor(FLASH3_FLOAT16, 2, 3, 2, 5, layout);
    EXPECT_EQ(t.damage(), "");
    fill_random(t.view, Distribution::kNormal, 1);
    EXPECT_EQ(t.damage(), "") << short_name(layout);
    t.bytes[t.offset - 1] = std::byte{0};
    EXPECT_NE(t.damage().find("byte -1 "), std::string::npos) << t.damage();
  }
  auto t = make_tensor(FLASH3_FLOAT16, 1, 1, 2, 5, Layout::kPadded);
  t.bytes[t.offset + 10] = std::byte{0};  // the gap behind head 0
  EXPECT_NE(t.damage().find("byte 10 "), std::string::npos) << t.damage();
  auto behind = make_tensor(FLASH3_FLOAT16, 1, 1, 1, 5, Layout::kBatchSeq);
  behind.bytes[behind.offset + 10] = std::byte{0};
  EXPECT_NE(behind.damage(), "");
}

Case small_case() { return *parse_id("bf16/b1/q9/k17/h2x1/d24/causal", nullptr); }

TEST(Runner, PassesTheCpuBackend) {
  HostMemory memory;
  const Verdict v = run_case(small_case(), memory, {});
  EXPECT_TRUE(v.passed()) << v.failure;
  EXPECT_GT(v.out.allowed, v.out.error);
}

TEST(Runner, CatchesADamagedGuard) {
  FaultyMemory memory([](void* to, size_t n, int call) {
    if (call == 0) static_cast<unsigned char*>(to)[n - 1] = 0;
  });
  EXPECT_NE(run_case(small_case(), memory, {}).failure.find("outside its elements"),
            std::string::npos);
}

TEST(Runner, CatchesAWrongElement) {
  FaultyMemory memory([](void* to, size_t n, int call) {
    if (call == 0) static_cast<uint16_t*>(to)[n / 4] = 0x4100;  // 8, in the middle of out
  });
  EXPECT_NE(run_case(small_case(), memory, {}).failure.find("got 8"), std::string::npos);
}

TEST(Runner, CatchesOtherBitsInASecondRun) {
  FaultyMemory memory([](void* to, size_t n, int call) {
    if (call == 3) static_cast<unsigned char*>(to)[n / 2] ^= 1;  // out, lse, workspace; out again
  });
  RunOptions options;
  options.repeat = 2;
  EXPECT_EQ(run_case(small_case(), memory, options).failure, "run 2 gave other bits than run 1");
}

TEST(Runner, ReportsWhatTheLibraryRefuses) {
  HostMemory memory;
  Case c = small_case();
  c.heads_q = 3, c.heads_k = 2;
  const Verdict v = run_case(c, memory, {});
  EXPECT_FALSE(v.passed());
  EXPECT_NE(v.failure.find("heads_q must be a multiple of heads_k"), std::string::npos)
      << v.failure;
}

}  // namespace
}  // namespace flash3::cases
