// SPDX-License-Identifier: Apache-2.0
// The check must fail what is wrong: every kind of mistake is made once, on purpose.
#include "cases/check.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "../parsed.hpp"
#include "cases/runner.hpp"
#include "core/convert.hpp"
#include "faulty_memory.hpp"

namespace flash3::cases {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

class Check : public testing::Test {
 protected:
  static constexpr int64_t kSeq = 3, kHeads = 2, kDim = 4, kElements = kSeq * kHeads * kDim;
  GuardedTensor got_ = make_tensor(FLASH3_BFLOAT16, 1, kSeq, kHeads, kDim, Layout::kPadded);
  GuardedTensor naive_ = make_tensor(FLASH3_BFLOAT16, 1, kSeq, kHeads, kDim, Layout::kBatchSeq);
  ReferenceForward reference_{
      std::vector<double>(kElements, 1.0), std::vector<double>(kSeq* kHeads, 0.0),
      std::vector<float>(kElements, 0.25f), std::vector<float>(kSeq* kHeads, 0.25f)};
  std::vector<double>& ref_ = reference_.out;

  void SetUp() override {
    for (int64_t i = 0; i < kElements; ++i) set(got_, i, 1.0f), set(naive_, i, 1.0f);
  }
  // Element i in [seq, heads, dim] order.
  static void set(const GuardedTensor& t, int64_t i, float x) {
    store_float(
        t.view.data, t.view.dtype,
        i / (kHeads * kDim) * t.view.stride[1] + i / kDim % kHeads * t.view.stride[2] + i % kDim,
        x);
  }
  TensorCheck checked() const { return check_out(got_.view, reference_, {}, naive_.view); }
};

TEST_F(Check, PassesWhatIsRight) {
  EXPECT_EQ(checked().failure, "");
  EXPECT_EQ(checked().error, 0);
  EXPECT_EQ(checked().fraction, 0);
}

TEST_F(Check, HoldsEachElementToItsOwnBound) {
  set(got_, 5, 1.25f);
  EXPECT_EQ(checked().failure, "");
  EXPECT_EQ(checked().fraction, 1);
  set(got_, 4, 0.25f);
  reference_.out_bound[4] = 1;  // a larger error, but less of its bound
  EXPECT_EQ(checked().failure, "");
  EXPECT_EQ(checked().fraction, 1);
  EXPECT_EQ(checked().error, 0.75);
  set(got_, 5, 1.5f);
  const std::string failure = checked().failure;
  EXPECT_NE(failure.find("out[0, 0, 1, 1]: got 1.5, ref 1; error 0.5 is 2 of its bound 0.25"),
            std::string::npos)
      << failure;
}

TEST_F(Check, NeedsAFiniteBound) {
  set(got_, 5, 1.5f);
  for (const double bound : {kInf, kNaN}) {
    reference_.out_bound[5] = static_cast<float>(bound);
    EXPECT_NE(checked().failure, "");
  }
}

TEST_F(Check, RmseIsOverFiniteElements) {
  ref_[0] = kInf;
  set(got_, 0, std::numeric_limits<float>::infinity());
  set(got_, 5, 1.5f), set(got_, 6, 0.f);
  set(naive_, 5, 1.25f);
  EXPECT_DOUBLE_EQ(checked().rmse, std::sqrt((0.5 * 0.5 + 1) / (kElements - 1)));
  EXPECT_DOUBLE_EQ(checked().naive_rmse, 0.25 / std::sqrt(kElements - 1));
}

TEST_F(Check, SeesAnElementThatWasNotWritten) {
  got_ = make_tensor(FLASH3_BFLOAT16, 1, kSeq, kHeads, kDim, Layout::kPadded);
  for (int64_t i = 0; i + 1 < static_cast<int64_t>(ref_.size()); ++i) set(got_, i, 1.0f);
  ref_.back() = kNaN;  // even where a NaN belongs
  EXPECT_NE(checked().failure.find("out was not written: [0, 2, 1, 3]"), std::string::npos)
      << checked().failure;
}

TEST_F(Check, WantsInfinitiesAndNaNsInTheirPlaces) {
  const float inf = std::numeric_limits<float>::infinity();
  ref_[3] = kInf, ref_[4] = -kInf, ref_[5] = kNaN;
  set(got_, 3, inf), set(got_, 4, -inf), set(got_, 5, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(checked().failure, "");
  set(got_, 4, inf);
  EXPECT_NE(checked().failure, "");
  set(got_, 4, -inf);
  set(got_, 5, 1);
  EXPECT_NE(checked().failure, "");
  set(got_, 5, inf);
  EXPECT_NE(checked().failure, "");
  ref_[5] = 1;
  EXPECT_NE(checked().failure, "");
}

TEST(LseCheck, HoldsEachRowToItsBound) {
  const auto got = make_lse(1, 1, 2, Layout::kPadded);
  auto* g = static_cast<float*>(got.view.data);
  const ReferenceForward ref{{}, {8, -kInf}, {}, {0x1p-14f, 0}};
  g[0] = 8 + 0x1p-15f, g[1] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(check_lse(got.view, ref).failure, "");
  g[0] = 8 + 0x1p-13f;
  EXPECT_NE(check_lse(got.view, ref).failure, "");
  g[0] = 8, g[1] = -1000;
  EXPECT_NE(check_lse(got.view, ref).failure, "");
}

// A result other than out and lse, as the checks of a forward call find it.
class AddedCheck : public testing::Test {
 protected:
  // Whether the value at [head, row] = [1, 2], or of head 1, may be this, and why not.
  std::string failure(const char* id, float value) const {
    const Case c = parsed(id);
    const bool of_heads = c.added.shape_of(*find_field<flash3_forward_params>(kName)) == "heads";
    const GuardedTensor got =
        of_heads ? make_vector(FLASH3_FLOAT32, 2) : make_lse(1, 2, 3, Layout::kPadded);
    const flash3_tensor& t = got.view;
    auto* const data = static_cast<float*>(t.data);
    if (of_heads) {
      data[0] = 5, data[1] = value;
    } else {
      for (int64_t i = 0; i < 6; ++i) data[i / 3 * t.stride[1] + i % 3] = 5;
      data[t.stride[1] + 2] = value;
    }
    ExpectedForward expected = expected_;
    ReferenceValues& ref = expected.ref.added[kName];
    ref = {std::vector<double>(of_heads ? 2 : 6, 5.0), std::vector<float>(of_heads ? 2 : 6, 0.25f)};
    ref.values.back() = ref_;
    if (naive_) {
      GuardedTensor& naive = expected.naive_extra.added[0];
      naive = clone(got);
      auto* const last = static_cast<float*>(naive.view.data);
      last[of_heads ? 1 : t.stride[1] + 2] = *naive_;
    }
    CheckResult result;
    check_forward(c, {{kName, &got}}, expected, &result);
    EXPECT_EQ(result.added.size(), 1u);
    return result.failure;
  }

  static constexpr const char* kName = "max_logits";
  static constexpr const char* kRows = "bf16/b1/q3/k4/h2/d8/full/max_logits=rows";
  static constexpr const char* kHeads = "bf16/b1/q3/k4/h2/d8/full/max_logits=heads";
  ExpectedForward expected_;
  double ref_ = 5;
  std::optional<float> naive_;
};

TEST_F(AddedCheck, HoldsEachValueToItsBound) {
  for (const char* id : {kRows, kHeads}) {
    EXPECT_EQ(failure(id, 5.25f), "") << id;
    EXPECT_NE(failure(id, 5.5f).find(id == kRows ? "max_logits[0, 1, 2]: got 5.5, ref 5"
                                                 : "max_logits[1]: got 5.5, ref 5"),
              std::string::npos)
        << failure(id, 5.5f);
    EXPECT_NE(failure(id, -std::numeric_limits<float>::infinity()), "") << id;
    EXPECT_NE(failure(id, std::numeric_limits<float>::quiet_NaN()), "") << id;
    EXPECT_NE(failure(id, std::bit_cast<float>(0xFFFFFFFFu)).find("was not written"),
              std::string::npos);
  }
}

TEST_F(AddedCheck, WantsInfinitiesInTheirPlacesAndNothingOfNaN) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const char* id : {kRows, kHeads}) {
    ref_ = -kInf;
    EXPECT_EQ(failure(id, -inf), "") << id;
    for (const float wrong : {0.f, -1e30f, inf}) EXPECT_NE(failure(id, wrong), "") << id;
    ref_ = kNaN;
    for (const float any : {0.f, inf, -inf}) EXPECT_EQ(failure(id, any), "") << id;
    EXPECT_NE(failure(id, std::bit_cast<float>(0xFFFFFFFFu)), "") << id;
  }
}

// The plain implementation's error counts where the call makes FP8 of its tensors, and only there.
TEST_F(AddedCheck, KnowsThatQuantizingErrs) {
  for (const std::string id : {kRows, kHeads}) {
    naive_ = 6.f;
    EXPECT_EQ(failure((id + "/fp8").c_str(), 7.25f), "") << id;
    EXPECT_NE(failure((id + "/fp8").c_str(), 7.5f), "") << id;
    EXPECT_NE(failure(id.c_str(), 5.5f), "") << id;
    naive_ = 5.f;
    EXPECT_NE(failure((id + "/fp8").c_str(), 6.f), "") << id;
  }
}

TEST_F(AddedCheck, FailsWithoutAReference) {
  const GuardedTensor got = make_vector(FLASH3_FLOAT32, 2);
  CheckResult result;
  check_forward(parsed(kHeads), {{kName, &got}}, expected_, &result);
  EXPECT_NE(result.failure.find("the oracle has no value of it"), std::string::npos);
}

// Right results of a case, and its oracle.
struct Forward {
  explicit Forward(const std::string& id, double v_of_head_0 = 1)
      : c(parsed(id)), tensors(make_forward_tensors(c)) {
    const flash3_tensor& v = tensors.v.view;
    for (int64_t j = 0; j < v.shape[1]; ++j)
      for (int64_t d = 0; d < v.shape[3]; ++d) {
        const int64_t at = j * v.stride[1] + d;
        store_float(v.data, v.dtype, at,
                    static_cast<float>(load_float(v.data, v.dtype, at) * v_of_head_0));
      }
    const auto params =
        make_params(c, tensors.q.view, tensors.k.view, v, tensors.out.view, tensors.lse.view);
    ForwardProblem problem;
    EXPECT_TRUE(make_forward_problem(&params, Pointers::kRequired, &problem).ok());
    ref = attention_ref(problem);
    fill_with(ref.out, &tensors.out);
    fill_with(ref.lse, &tensors.lse);
  }
  // Element [0, row, head, d] of out.
  int64_t place(int64_t row, int64_t head, int64_t d) const {
    return row * tensors.out.view.stride[1] + head * tensors.out.view.stride[2] + d;
  }
  float get(int64_t at) const {
    return load_float(tensors.out.view.data, tensors.out.view.dtype, at);
  }
  void set(int64_t at, float x) const {
    store_float(tensors.out.view.data, tensors.out.view.dtype, at, x);
  }
  std::string failure() const { return check_out(tensors.out.view, ref).failure; }
  Case c;
  ForwardTensors tensors;
  ReferenceForward ref;
};

TEST(ElementCheck, PassesTheExactResult) {
  for (const char* id :
       {"bf16/b2/q70/k90/h2x1/d40x24/causal", "fp16/b1/q9/k17/h1/d64/full/outliers",
        "fp32/b1/q40/k40/h2/d8/w3:2", "bf16/b1/q20/k30/h1/d8/full/softcap2",
        "bf16/b1/q8/k20/h2/d16/full/special"}) {
    const Forward f(id);
    EXPECT_EQ(f.failure(), "") << id;
    EXPECT_EQ(check_lse(f.tensors.lse.view, f.ref).failure, "") << id;
  }
}

// Head 0 has values so large that their rounding is a larger error than any in head 1, of which one
// tile of 16 rows and 8 columns is that of other rows.
TEST(ElementCheck, SeesATileOfSmallValuesBesideLargeErrors) {
  for (const auto& [dtype, v_of_head_0] :
       {std::pair{"bf16", 1e4}, std::pair{"fp16", 1e4}, std::pair{"fp32", 1e8}}) {
    const Forward f(std::string(dtype) + "/b1/q64/k64/h2/d32/full", v_of_head_0);
    const double largest = check_out(f.tensors.out.view, f.ref).error;
    EXPECT_EQ(f.failure(), "") << dtype;
    for (int64_t row = 16; row < 32; ++row)
      for (int64_t d = 8; d < 16; ++d) f.set(f.place(row, 1, d), f.get(f.place(row + 16, 1, d)));
    EXPECT_NE(f.failure().find(", 1, "), std::string::npos) << dtype << f.failure();
    EXPECT_EQ(check_out(f.tensors.out.view, f.ref).error, largest) << dtype;
  }
}

TEST(ElementCheck, FailsThreeTimesTheBound) {
  for (const char* dtype : {"bf16", "fp16", "fp32"}) {
    const Forward f(std::string(dtype) + "/b1/q40/k50/h2/d16/causal");
    for (int64_t i = 0; i < 40; i += 3) {
      const int64_t at = f.place(i, 1, i % 16);
      const size_t in_ref = static_cast<size_t>((i * 2 + 1) * 16 + i % 16);
      const float right = f.get(at);
      for (const int sign : {-1, 1}) {
        f.set(at, static_cast<float>(f.ref.out[in_ref] + 3.0 * sign * f.ref.out_bound[in_ref]));
        EXPECT_NE(f.failure(), "") << dtype << " row " << i;
      }
      f.set(at, right);
    }
    EXPECT_EQ(f.failure(), "");
  }
}

TEST(ElementCheck, SeesAnLseThatIsOffByAThousandth) {
  for (const char* id :
       {"bf16/b1/q40/k300/h2/d128/causal", "fp16/b1/q40/k300/h2/d256/full/outliers",
        "bf16/b1/q40/k300/h2/d128/full/softcap20"}) {
    const Forward f(id);
    auto* lse = static_cast<float*>(f.tensors.lse.view.data);
    for (const int row : {0, 17, 39}) {
      lse[row] += 1e-3f;
      EXPECT_NE(check_lse(f.tensors.lse.view, f.ref).failure, "") << id;
      lse[row] -= 1e-3f;
    }
    EXPECT_EQ(check_lse(f.tensors.lse.view, f.ref).failure, "") << id;
  }
}

// In FP8 a block of 128 rows of a head is one: not hidden by larger errors of another.
TEST(Fp8Check, SeesAWrongBlockOfRows) {
  const Case c = parsed("e4m3/b1/q300/k300/h2/d16/full/outfp16");
  const ReferenceForward ref{
      std::vector<double>(300 * 2 * 16, 1.0), {}, std::vector<float>(300 * 2 * 16, 0.1f), {}};
  const GuardedTensor got = make_tensor(FLASH3_FLOAT16, 1, 300, 2, 16, Layout::kPadded);
  const auto fill = [&](int64_t from, int64_t to, int64_t head, float x) {
    for (int64_t row = from; row < to; ++row)
      for (int64_t d = 0; d < 16; ++d)
        store_float(got.view.data, got.view.dtype,
                    row * got.view.stride[1] + head * got.view.stride[2] + d, x);
  };
  fill(0, 300, 0, 1.f), fill(0, 300, 1, 1.f);
  EXPECT_EQ(check_out(c, got.view, ref, {}, {}).failure, "");
  fill(128, 256, 1, 1.09f);
  EXPECT_EQ(check_out(c, got.view, ref, {}, {}).failure, "");
  EXPECT_NEAR(check_out(c, got.view, ref, {}, {}).fraction, 0.9, 0.05);
  fill(128, 256, 1, 1.12f);
  const std::string failure = check_out(c, got.view, ref, {}, {}).failure;
  EXPECT_NE(failure.find("batch 0, head 1, rows from 128"), std::string::npos) << failure;
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
  t.bytes[t.offset + 10] = std::byte{0};  // the gap after head 0
  EXPECT_NE(t.damage().find("byte 10 "), std::string::npos) << t.damage();
  auto after = make_tensor(FLASH3_FLOAT16, 1, 1, 1, 5, Layout::kBatchSeq);
  after.bytes[after.offset + 10] = std::byte{0};
  EXPECT_NE(after.damage(), "");
}

Case small_case() { return *parse_id("bf16/b1/q9/k17/h2x1/d24/causal", nullptr); }

TEST(Runner, PassesTheCpuBackend) {
  HostMemory memory;
  const CheckResult v = run_case(small_case(), memory, {});
  EXPECT_TRUE(v.passed()) << v.failure;
  EXPECT_GT(v.out.fraction, 0);
  EXPECT_LT(v.out.fraction, 1);
}

// What is looked at after a call: out, lse, the workspace, q, k, v; after a second one both sides
// of the workspace.
constexpr int kLooks = 6;
int first_input(int run) { return run == 0 ? 3 : kLooks + 4; }

// Also in a second run.
TEST(Runner, CatchesADamagedGuard) {
  RunOptions options;
  options.repeat = 2;
  for (const int wanted : {0, 1, kLooks, kLooks + 1}) {
    FaultyMemory memory([=](void* to, size_t n, int look) {
      if (look == wanted) static_cast<unsigned char*>(to)[n - 1] = 0;
    });
    const std::string failure = run_case(small_case(), memory, options).failure;
    EXPECT_NE(failure.find("outside its elements"), std::string::npos) << failure;
  }
}

TEST(Runner, CatchesAnOverwrittenInput) {
  RunOptions options;
  options.repeat = 2;
  for (const int run : {0, 1})
    for (int i = 0; i < 3; ++i) {
      FaultyMemory memory([=](void* to, size_t n, int look) {
        if (look == first_input(run) + i) static_cast<unsigned char*>(to)[n / 2] ^= 1;
      });
      EXPECT_EQ(run_case(small_case(), memory, options).failure,
                std::string(1, "qkv"[i]) + " is an input and was overwritten");
    }
}

TEST(Runner, CatchesAWorkspaceWrittenAround) {
  RunOptions options;
  options.repeat = 2;
  for (const int wanted : {2, kLooks + 2, kLooks + 3}) {
    FaultyMemory memory([=](void* to, size_t n, int look) {
      if (look == wanted) static_cast<unsigned char*>(to)[n - 1] = 0;
    });
    const std::string failure = run_case(small_case(), memory, options).failure;
    EXPECT_EQ(failure.find("workspace: "), 0u) << failure;
  }
}

TEST(Runner, CatchesAWrongElement) {
  FaultyMemory memory([](void* to, size_t n, int look) {
    if (look == 0) static_cast<uint16_t*>(to)[n / 4] = 0x4100;  // 8, in the middle of out
  });
  EXPECT_NE(run_case(small_case(), memory, {}).failure.find("got 8"), std::string::npos);
}

TEST(Runner, CatchesOtherBitsInASecondRun) {
  FaultyMemory memory([](void* to, size_t n, int look) {
    if (look == kLooks) static_cast<unsigned char*>(to)[n / 2] ^= 1;
  });
  RunOptions options;
  options.repeat = 2;
  EXPECT_EQ(run_case(small_case(), memory, options).failure, "run 2 gave other bits than run 1");
}

// What is looked at: out and scale of q, k, v, the workspace (after a second call both its sides),
// then q, k, v.
TEST(QuantizeRunner, CatchesDamageInEveryRun) {
  const Case c = parsed("bf16/b1/q9/k17/h2x1/d64/full/quantize/headscales");
  HostMemory sound;
  EXPECT_EQ(run_case(c, sound, {}).failure, "");
  RunOptions options;
  options.repeat = 2;
  for (const int run : {0, 1}) {
    FaultyMemory guard([=](void* to, size_t n, int look) {
      if (look == run * 10 + 2) static_cast<unsigned char*>(to)[n - 1] = 0;
    });
    EXPECT_EQ(run_case(c, guard, options).failure.find("k_out: byte"), 0u);
    FaultyMemory input([=](void* to, size_t n, int look) {
      if (look == (run == 0 ? 9 : 20)) static_cast<unsigned char*>(to)[n / 2] ^= 1;
    });
    EXPECT_EQ(run_case(c, input, options).failure, "v is an input and was overwritten");
  }
}

TEST(Runner, ReportsWhatTheLibraryRefuses) {
  HostMemory memory;
  Case c = small_case();
  c.heads_q = 3, c.heads_k = 2;
  const CheckResult v = run_case(c, memory, {});
  EXPECT_FALSE(v.passed());
  EXPECT_NE(v.failure.find("heads_q must be a multiple of heads_k"), std::string::npos)
      << v.failure;
}

}  // namespace
}  // namespace flash3::cases
