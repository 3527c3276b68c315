// SPDX-License-Identifier: Apache-2.0
// Infinities and NaN must show exactly where the definition puts them: in rows that see them.
#include <cmath>
#include <cstring>
#include <limits>

#include "../core/call.hpp"
#include "cases/memory.hpp"
#include "cases/runner.hpp"
#include "core/convert.hpp"
#include "harness.hpp"

namespace flash3::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

void set(const flash3_tensor& t, int64_t s, int64_t h, int64_t d, float x) {
  store_float(t.data, t.dtype, s * t.stride[1] + h * t.stride[2] + d, x);
}

// change(tensors) edits the inputs; then out and lse must have the oracle's infinities and NaNs.
template <class Change>
void check_with(const std::string& id, const Change& change) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    std::string error;
    const auto c = cases::parse_id(dtype + id, &error);
    ASSERT_TRUE(c) << error;
    cases::ForwardTensors t = cases::make_forward_tensors(*c);
    change(t);
    const auto problem =
        to_problem(cases::make_params(*c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view));
    const ReferenceForward ref = attention_ref(problem);
    for (const TestTarget& target : test_targets(problem.dtype)) {
      SCOPED_TRACE(dtype + id + " on " + target.name());
      std::fill(t.out.bytes.begin(), t.out.bytes.end(), std::byte{0xFF});
      std::fill(t.lse.bytes.begin(), t.lse.bytes.end(), std::byte{0xFF});
      run_on(target, problem);
      EXPECT_EQ(cases::check_out(t.out.view, ref).failure, "");
      EXPECT_EQ(cases::check_lse(t.lse.view, ref).failure, "");
    }
  }
}

// Every value of V from key 40 on is infinite or NaN; only the rows that see such a key may know.
TEST(SpecialValues, InVOfMaskedKeys) {
  const auto spoil = [](const cases::ForwardTensors& t) {
    for (int64_t j = 40; j < t.v.view.shape[1]; ++j)
      for (int64_t d = 0; d < t.v.view.shape[3]; ++d)
        set(t.v.view, j, 0, d, (j + d) % 3 == 0 ? kNaN : kInf);
  };
  for (const char* mask : {"causal", "w3:2", "w0:0", "w:5"})
    check_with(std::string("/b1/q150/k150/h2x1/d40x33/") + mask, spoil);
  check_with("/b1/q45/k150/h1/d64/causal", spoil);
}

// The other way round: the last rows see none of the spoilt keys.
TEST(SpecialValues, InVBeforeAWindow) {
  check_with("/b1/q130/k130/h1/d64/w20:0", [](const cases::ForwardTensors& t) {
    for (int64_t j = 0; j < 61; ++j) set(t.v.view, j, 0, j % 64, j % 2 ? kNaN : -kInf);
  });
}

TEST(SpecialValues, InVThatAllSee) {
  check_with("/b1/q70/k90/h1/d64/full", [](const cases::ForwardTensors& t) {
    set(t.v.view, 10, 0, 3, kInf);
    set(t.v.view, 20, 0, 3, kInf);
    set(t.v.view, 30, 0, 5, kInf);
    set(t.v.view, 31, 0, 5, -kInf);
    set(t.v.view, 89, 0, 63, kNaN);
  });
}

TEST(SpecialValues, NaNInQ) {
  check_with("/b1/q70/k90/h2x1/d64/causal", [](const cases::ForwardTensors& t) {
    set(t.q.view, 0, 0, 0, kNaN);
    set(t.q.view, 33, 1, 63, kNaN);
    set(t.q.view, 69, 0, 7, kInf);  // scores of both signs: NaN
  });
}

// A row of NaN that sees no key is still 0.
TEST(SpecialValues, NaNInQOfABlindRow) {
  check_with("/b1/q40/k20/h1/d16/causal", [](const cases::ForwardTensors& t) {
    for (int64_t i = 0; i < 20; ++i) set(t.q.view, i, 0, i % 16, kNaN);
  });
}

// An infinite K makes its score +∞ in some rows (NaN) and −∞ in others (weight 0).
TEST(SpecialValues, InK) {
  for (const char* mask : {"full", "causal", "w10:3"}) {
    check_with(std::string("/b1/q100/k100/h1/d32/") + mask, [](const cases::ForwardTensors& t) {
      set(t.k.view, 50, 0, 2, kInf);
      set(t.k.view, 77, 0, 2, -kInf);
      set(t.k.view, 20, 0, 31, kNaN);
    });
  }
}

// All scores −∞: every weight is 0, as if the row saw nothing.
TEST(SpecialValues, AllScoresMinusInfinity) {
  check_with("/b1/q10/k30/h1/d1/full", [](const cases::ForwardTensors& t) {
    for (int64_t i = 0; i < 10; ++i) set(t.q.view, i, 0, 0, 1.f);
    for (int64_t j = 0; j < 30; ++j) set(t.k.view, j, 0, 0, -kInf);
  });
}

// A NaN whose payload is not the usual one.
TEST(SpecialValues, NaNWithAPayload) {
  check_with("/b1/q20/k64/h1/d16/full", [](const cases::ForwardTensors& t) {
    if (t.q.view.dtype == FLASH3_FLOAT32) {
      const uint32_t bits[] = {0x7FC00001u, 0xFFC12345u, 0x7FFFFFFFu, 0x7FC001FFu};
      for (int i = 0; i < 4; ++i)
        std::memcpy(static_cast<float*>(t.q.view.data) + i * t.q.view.stride[1], &bits[i], 4);
    } else {
      const uint16_t bits[] = {0x7FFF, 0xFFC5, 0x7FE1, 0xFFFE};
      for (int i = 0; i < 4; ++i)
        std::memcpy(static_cast<uint16_t*>(t.q.view.data) + i * t.q.view.stride[1], &bits[i], 2);
    }
  });
}

// Scores far apart, and far from zero: nothing overflows on the way.
TEST(SpecialValues, LargeScores) {
  check_with("/b1/q50/k200/h1/d8/causal", [](const cases::ForwardTensors& t) {
    for (int64_t i = 0; i < 50; ++i) set(t.q.view, i, 0, 0, 60.f);
    for (int64_t j = 0; j < 200; ++j) set(t.k.view, j, 0, 0, j % 2 ? 100.f : -100.f);
  });
}

// ---- the ends of what softmax_scale and softcap may be ----

// Scores of up to about 1e18 · 1e6, and of so many small ones: as the definition has them.
TEST(Scores, AtTheEndsOfScaleAndSoftcap) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const char* scale :
         {"", "/scale1e-18", "/scale1e-6", "/scale1e6", "/scale1e9", "/scale1e12", "/scale1e18"})
      for (const char* cap :
           {"", "/softcap1e-18", "/softcap1e-6", "/softcap1e6", "/softcap1e12", "/softcap1e18"})
        for (const char* rest : {"/b1/q70/k600/h2x1/d64/causal", "/b1/q3/k40/h2/d72x24/full/sink"})
          check_case(std::string(dtype) + rest + scale + cap, 2);
}

// Gradients as the definition has them, where lse can tell the weights.
TEST(Scores, GradientsAtTheEndsOfScaleAndSoftcap) {
  cases::HostMemory memory;
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const char* scale : {"", "/scale1e-18", "/scale1e-6", "/scale1"})
      for (const char* cap : {"", "/softcap1e-18", "/softcap1e-6", "/softcap1e6", "/softcap1e18"}) {
        std::string error;
        const auto c = cases::parse_id(
            std::string(dtype) + "/b1/q70/k90/h2x1/d64/causal" + scale + cap + "/bwd", &error);
        ASSERT_TRUE(c) << error;
        cases::RunOptions options;
        options.num_threads = 2;
        EXPECT_EQ(run_case(*c, memory, options).failure, "") << to_id(*c);
      }
}

// Where lse cannot tell them, being rounded, they are still weights.
TEST(Scores, GradientsOfTheLargestAreFinite) {
  for (const float scale : {1e6f, 1e9f, 1e12f, 1e18f})
    for (const float softcap : {0.f, 1e18f}) {
      BackwardCall call({.batch = 2, .seq_q = 33, .seq_k = 70, .head_dim = 64, .head_dim_v = 64});
      call.args.softmax_scale = scale, call.args.softcap = softcap;
      call.args.backend = FLASH3_BACKEND_CPU;
      call.run_forward();
      call.args.workspace_size = workspace(call.args);
      std::vector<std::byte> memory(call.args.workspace_size + 256);
      call.args.workspace =
          memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256);
      backward(call.args);
      for (const auto* gradient : {&call.dq, &call.dk, &call.dv})
        for (const float x : *gradient) ASSERT_TRUE(std::isfinite(x)) << scale << ", " << softcap;
    }
}

}  // namespace
}  // namespace flash3::test
