// SPDX-License-Identifier: Apache-2.0
// The check of gradients must fail what is wrong, and the runner must see it: every kind of mistake
// is made once, on purpose.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "../parsed.hpp"
#include "cases/check.hpp"
#include "cases/runner.hpp"
#include "core/convert.hpp"
#include "faulty_memory.hpp"

namespace flash3::cases {
namespace {

// A case with its oracle, and gradients that pass: the oracle's.
class Gradients {
 public:
  explicit Gradients(const std::string& id) : c_(parsed(id)), got_(make_backward_tensors(c_)) {
    const auto params = make_backward_params(c_, got_.views());
    BackwardProblem problem;
    EXPECT_TRUE(make_backward_problem(&params, Pointers::kRequired, &problem).ok());
    ref_ = attention_backward_ref(problem);
    fill_with(ref_.dq, &got_.dq);
    fill_with(ref_.dk, &got_.dk);
    fill_with(ref_.dv, &got_.dv);
  }
  GradientChecks checks() const { return check_gradients(c_, got_.views(), ref_); }
  std::string failure() const { return checks().failure(); }
  ReferenceBackward& ref() { return ref_; }
  // Element [0, seq, 0, 0].
  static void set(const GuardedTensor& t, int64_t seq, float x) {
    store_float(t.view.data, t.view.dtype, seq * t.view.stride[1], x);
  }
  static float get(const GuardedTensor& t, int64_t seq) {
    return load_float(t.view.data, t.view.dtype, seq * t.view.stride[1]);
  }
  BackwardTensors& got() { return got_; }

 private:
  Case c_;
  BackwardTensors got_;
  ReferenceBackward ref_;
};

TEST(GradientCheck, PassesWhatIsRight) {
  for (const char* id : {"bf16/b2/q9/k17/h2x1/d24/causal/bwd", "fp16/b1/q33/k20/h2/d8x16/full/dlse",
                         "fp32/b1/q20/k20/h1/d64/w3:2/bwd", "bf16/b1/q9/k0/h1/d8/full/bwd",
                         "bf16/b1/q0/k9/h1/d8/full/bwd", "fp32/b2/q9/k9/h2/d8/full/special/bwd"})
    EXPECT_EQ(Gradients(id).failure(), "") << id;
}

TEST(GradientCheck, SeesAWrongElementOfEach) {
  for (GuardedTensor BackwardTensors::*tensor :
       {&BackwardTensors::dq, &BackwardTensors::dk, &BackwardTensors::dv}) {
    Gradients g("bf16/b1/q9/k17/h2x1/d24/causal/bwd");
    Gradients::set(g.got().*tensor, 4, 9.f + Gradients::get(g.got().*tensor, 4));
    const char* name = tensor == &BackwardTensors::dq   ? "dq[0, 4, 0, 0]: got "
                       : tensor == &BackwardTensors::dk ? "dk[0, 4, 0, 0]: got "
                                                        : "dv[0, 4, 0, 0]: got ";
    EXPECT_NE(g.failure().find(name), std::string::npos) << g.failure();
    EXPECT_NE(g.failure().find("of its bound"), std::string::npos) << g.failure();
  }
}

TEST(GradientCheck, FailsThreeTimesTheBound) {
  struct Part {
    GuardedTensor BackwardTensors::*tensor;
    std::vector<double> ReferenceBackward::*ref;
    std::vector<float> ReferenceBackward::*bound;
    int64_t heads;
  };
  for (const char* dtype : {"bf16", "fp16", "fp32"})
    for (const Part& part :
         {Part{&BackwardTensors::dq, &ReferenceBackward::dq, &ReferenceBackward::dq_bound, 2},
          Part{&BackwardTensors::dk, &ReferenceBackward::dk, &ReferenceBackward::dk_bound, 1},
          Part{&BackwardTensors::dv, &ReferenceBackward::dv, &ReferenceBackward::dv_bound, 1}}) {
      Gradients g(std::string(dtype) + "/b1/q40/k40/h2x1/d24/causal/bwd/softcap20");
      EXPECT_EQ(g.failure(), "");
      for (const int64_t row : {3, 20, 39}) {
        const auto i = static_cast<size_t>(row * part.heads * 24);
        const float right = Gradients::get(g.got().*part.tensor, row);
        Gradients::set(g.got().*part.tensor, row,
                       static_cast<float>((g.ref().*part.ref)[i] + 3. * (g.ref().*part.bound)[i]));
        EXPECT_NE(g.failure(), "") << dtype << " row " << row;
        Gradients::set(g.got().*part.tensor, row, right);
      }
    }
}

TEST(GradientCheck, SeesAnElementThatWasNotWritten) {
  Gradients g("fp32/b1/q9/k17/h2x1/d24/causal/bwd");
  g.got().dk.fill_pattern();
  EXPECT_NE(g.failure().find("dk was not written: [0, 0, 0, 0]"), std::string::npos) << g.failure();
}

// However small: dq of rows that see no key, dk and dv of keys that no row sees.
TEST(GradientCheck, WantsExactZerosWhereTheMaskLeavesNothing) {
  constexpr float kTiny = 1e-30f;
  Gradients rows("bf16/b1/q9/k5/h1/d8/causal/bwd");
  EXPECT_EQ(Gradients::get(rows.got().dq, 3), 0.f);
  Gradients::set(rows.got().dq, 3, kTiny);
  EXPECT_NE(rows.failure().find("dq must be exactly 0: [0, 3, 0, 0]"), std::string::npos)
      << rows.failure();

  for (GuardedTensor BackwardTensors::*tensor : {&BackwardTensors::dk, &BackwardTensors::dv}) {
    Gradients keys("bf16/b1/q5/k17/h1/d8/w2:0/bwd");
    EXPECT_EQ(Gradients::get(keys.got().*tensor, 9), 0.f);
    Gradients::set(keys.got().*tensor, 9, -kTiny);
    EXPECT_NE(keys.failure().find("must be exactly 0: [0, 9, 0, 0]"), std::string::npos)
        << keys.failure();
    Gradients::set(keys.got().*tensor, 9, 0.f);
    Gradients::set(keys.got().*tensor, 10, Gradients::get(keys.got().*tensor, 10) + kTiny);
    EXPECT_EQ(keys.failure(), "");  // key 10 is seen: here a tiny difference is none
  }
}

TEST(GradientCheck, WantsNaNsInTheirPlaces) {
  Gradients g("bf16/b2/q9/k9/h2/d8/full/special/bwd");
  EXPECT_EQ(g.failure(), "");
  EXPECT_TRUE(std::isnan(Gradients::get(g.got().dq, 4)));
  Gradients::set(g.got().dq, 4, 1.f);
  EXPECT_NE(g.failure().find("dq[0, 4, 0, 0]: got 1, ref nan"), std::string::npos) << g.failure();
  Gradients::set(g.got().dq, 4, std::nanf(""));
  Gradients::set(g.got().dq, 5, std::nanf(""));
  EXPECT_NE(g.failure().find("dq[0, 5, 0, 0]: got nan"), std::string::npos) << g.failure();
}

constexpr char kCase[] = "bf16/b1/q9/k17/h2x1/d24/causal/bwd/dlse";
constexpr char kDeterministic[] = "bf16/b1/q9/k17/h2x1/d24/causal/bwd/deterministic";

TEST(BackwardRunner, PassesTheCpuBackend) {
  HostMemory memory;
  RunOptions options;
  options.repeat = 3;
  for (const char* id : {kCase, kDeterministic}) {
    const CheckResult v = run_case(parsed(id), memory, options);
    EXPECT_TRUE(v.passed()) << v.failure;
    for (const TensorCheck* part : {&v.dq, &v.dk, &v.dv}) {
      EXPECT_GT(part->fraction, 0);
      EXPECT_LT(part->fraction, 1);
    }
  }
}

// What comes back from a call: dq, dk, dv, dsink, workspace, then the inputs in this order.
constexpr int kDq = 0, kDv = 2, kInputs = 5;

TEST(BackwardRunner, CatchesADamagedGuard) {
  RunOptions options;
  options.repeat = 2;
  for (const auto& [download, name] :
       {std::pair{kDq, "dq: "}, std::pair{kDv, "dv: "}, std::pair{kInputs + 7 + kDv, "dv: "}}) {
    FaultyMemory memory([wanted = download](void* to, size_t n, int look) {
      if (look == wanted) static_cast<unsigned char*>(to)[n - 1] = 0;
    });
    const std::string failure = run_case(parsed(kCase), memory, options).failure;
    EXPECT_EQ(failure.find(name), 0u) << failure;
    EXPECT_NE(failure.find("outside its elements"), std::string::npos) << failure;
  }
}

TEST(BackwardRunner, CatchesAnOverwrittenInput) {
  const char* inputs[] = {"q", "k", "v", "out", "lse", "dout", "dlse"};
  for (int i = 0; i < 7; ++i) {
    FaultyMemory memory([i](void* to, size_t n, int look) {
      if (look == kInputs + i) static_cast<unsigned char*>(to)[n / 2] ^= 1;
    });
    EXPECT_EQ(run_case(parsed(kCase), memory, {}).failure,
              std::string(inputs[i]) + " is an input and was overwritten");
  }
}

TEST(BackwardRunner, CatchesAWrongElement) {
  FaultyMemory memory([](void* to, size_t n, int look) {
    if (look == kDv) static_cast<uint16_t*>(to)[n / 4] = 0x4200;  // 32, in the middle of dv
  });
  EXPECT_NE(run_case(parsed(kCase), memory, {}).failure.find("got 32"), std::string::npos);
}

// One bit in the second run: an error if the bits were promised, else only a matter of size.
TEST(BackwardRunner, HoldsDeterministicCasesToTheirBits) {
  const auto flip_in_second_run = [](int calls_of_first_run, unsigned char bit) {
    return [=](void* to, size_t n, int look) {
      if (look == calls_of_first_run + kDv) static_cast<unsigned char*>(to)[n / 4 * 2] ^= bit;
    };
  };
  RunOptions options;
  options.repeat = 2;
  FaultyMemory exact(flip_in_second_run(kInputs + 6, 1));  // without dlse
  EXPECT_EQ(run_case(parsed(kDeterministic), exact, options).failure,
            "run 2 gave other bits than run 1");
  FaultyMemory close(flip_in_second_run(kInputs + 7, 1));
  EXPECT_EQ(run_case(parsed(kCase), close, options).failure, "");
  FaultyMemory wrong([](void* to, size_t n, int look) {
    if (look == kInputs + 7 + kDv) static_cast<uint16_t*>(to)[n / 4] = 0x4200;
  });
  EXPECT_NE(run_case(parsed(kCase), wrong, options).failure.find("got 32"), std::string::npos);
}

TEST(BackwardRunner, ReportsWhatTheLibraryRefuses) {
  HostMemory memory;
  const CheckResult heads = run_case(parsed("bf16/b1/q4/k4/h3x2/d8/full/bwd"), memory, {});
  EXPECT_NE(heads.failure.find("heads_q must be a multiple of heads_k"), std::string::npos)
      << heads.failure;
  const CheckResult lse = run_case(parsed("bf16/b1/q4/k4/h2/d8/full/nolse/bwd"), memory, {});
  EXPECT_NE(lse.failure.find("the backward needs the lse"), std::string::npos) << lse.failure;
}

}  // namespace
}  // namespace flash3::cases
