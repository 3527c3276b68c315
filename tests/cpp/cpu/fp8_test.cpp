// SPDX-License-Identifier: Apache-2.0
// FP8 on the CPU: the forward on every instruction set, flash3_quantize on any number of threads,
// and the call that does both.
#include <cmath>
#include <cstring>
#include <limits>

#include "../parsed.hpp"
#include "cases/memory.hpp"
#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "core/convert.hpp"
#include "core/quantized_forward.hpp"
#include "cpu/rows.hpp"
#include "harness.hpp"
#include "oracle/definition.hpp"

namespace flash3::test {
namespace {

TEST(Fp8, MatchesTheOracle) {
  const std::vector<std::string> queries{"q0", "q1", "q5", "q64", "q127", "q128", "q129", "q300"},
      keys{"k0", "k1", "k16", "k63", "k127", "k128", "k129", "k513", "k1100"},
      dims{"d1", "d8", "d33", "d64", "d80", "d72x1", "d1x72", "d192x128", "d31x255", "d256"},
      heads{"h1", "h4x2", "h8x1"}, masks{"full", "causal", "w0:0", "w10:3", "w100:"},
      layouts{"", "/bhsd", "/padded", "/odd"},
      scales{"", "/onescale", "/headscales", "/blockscales"}, outs{"", "/outfp16", "/outfp32"},
      extras{"", "/sink", "/softcap5", "/outliers", "/sink16/chunk37"};
  const auto size = [](const auto& v) { return static_cast<int>(v.size()); };
  for (const auto& row :
       cases::pairwise({size(queries), size(keys), size(dims), size(heads), size(masks),
                        size(layouts), size(scales), size(outs), size(extras), 2})) {
    const auto pick = [&](const auto& v, int factor) {
      return v[static_cast<size_t>(row[factor])];
    };
    const bool same = pick(outs, 7) == "/outfp32" && row[8] == 4;  // sink16 is float32 then
    check_case("e4m3/b" + std::to_string(row[9] + 1) + "/" + pick(queries, 0) + "/" +
                   pick(keys, 1) + "/" + pick(heads, 3) + "/" + pick(dims, 2) + "/" +
                   pick(masks, 4) + pick(layouts, 5) + pick(scales, 6) +
                   (same ? std::string() : pick(outs, 7)) + pick(extras, 8),
               1 + row[9] * 2);
    if (HasFatalFailure()) return;
  }
}

// More threads than rows: the keys are split, and the parts merged into out's dtype.
TEST(Fp8, SplitKeys) {
  for (const char* out : {"", "/outfp16", "/outfp32"})
    check_case(std::string("e4m3/b1/q2/k5000/h2x1/d64/full/blockscales") + out, 8);
}

void run(const std::vector<cases::Case>& list, int threads) {
  cases::HostMemory memory;
  cases::RunOptions options;
  options.num_threads = threads;
  options.oracle_threads = 0;
  options.repeat = 2;
  for (const cases::Case& c : list) {
    const cases::CheckResult result = run_case(c, memory, options);
    ASSERT_EQ(result.failure, "") << to_id(c);
  }
}

TEST(Fp8, RaggedTable) {
  std::vector<cases::Case> list = cases::fp8_case_table(cases::Level::kQuick, true);
  // The rest is for flash3 verify.
  std::erase_if(list, [](const cases::Case& c) { return c.batch * c.seq_q > 10'000; });
  run(list, 3);
}

TEST(Quantize, Table) {
  run(cases::quantize_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_CPU)), 3);
}

using cases::parsed;

// Values that the CPU's rule rounds as written: scales by hand.
TEST(Quantize, ByHand) {
  float q[2][2] = {{3.f, -448.f}, {449.f, 0.01f}};
  unsigned char codes[2][2] = {};
  float scale[1] = {};
  QuantizeProblem p;
  p.dtype = FLASH3_FLOAT32;
  p.batch = 1;
  p.sequences_q = {.rows = 2, .max_length = 2};
  p.q.given = true;
  p.q.in = {q, 1, 2, 1, 2, 0, 2, 0};
  p.q.out = {codes, 1, 2, 1, 2, 0, 2, 0};
  p.q.scale.data = scale;
  p.q.scale.kind = ScaleKind::kBlock;
  ASSERT_TRUE(run_quantize(p, plan_quantize(p)).ok());
  EXPECT_EQ(scale[0], 2.f);  // 449 / 448, the next power of two
  EXPECT_EQ(e4m3_to_float(codes[0][0]), 1.5f);
  EXPECT_EQ(e4m3_to_float(codes[0][1]), -224.f);
  EXPECT_EQ(e4m3_to_float(codes[1][0]), 224.f);
  EXPECT_EQ(e4m3_to_float(codes[1][1]), 3 * 0x1p-9f);

  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    q[1][1] = bad;
    ASSERT_TRUE(run_quantize(p, plan_quantize(p)).ok());
    EXPECT_TRUE(std::isnan(scale[0]));
    for (const unsigned char code : {codes[0][0], codes[1][1]})
      EXPECT_TRUE(std::isnan(e4m3_to_float(code)));
  }
}

// The rotation leaves all products of queries with keys as they are, and the values spread.
TEST(Quantize, RotationKeepsScores) {
  for (const char* id :
       {"fp32/b1/q9/k7/h1/d64/full", "fp32/b1/q9/k7/h1/d96/full", "fp32/b1/q9/k7/h1/d7/full"}) {
    const cases::Case c = parsed(id);
    const cases::ForwardTensors t = cases::make_forward_tensors(c);
    auto params = cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view);
    params.compute = FLASH3_COMPUTE_FP8;
    const ForwardProblem problem = to_problem(params);
    QuantizeProblem rotated = quantized_forward(problem).quantize, plain = rotated;
    plain.rotates = false;
    const auto values = [](const QuantizeProblem& p, QuantizeWhich which) {
      return quantize_values_ref(p, which).values;
    };
    const auto q = values(plain, QuantizeWhich::kQ), k = values(plain, QuantizeWhich::kK);
    const auto rq = values(rotated, QuantizeWhich::kQ), rk = values(rotated, QuantizeWhich::kK);
    EXPECT_NE(q, rq);
    for (int64_t i = 0; i < 9; ++i)
      for (int64_t j = 0; j < 7; ++j) {
        double dot = 0, rotated_dot = 0;
        for (int64_t d = 0; d < c.head_dim; ++d) {
          dot += q[size_t(i * c.head_dim + d)] * k[size_t(j * c.head_dim + d)];
          rotated_dot += rq[size_t(i * c.head_dim + d)] * rk[size_t(j * c.head_dim + d)];
        }
        EXPECT_NEAR(dot, rotated_dot, 1e-12 * double(c.head_dim)) << id;
      }
  }
}

// A scale of NaN: rows that see its block are NaN, others are as they were.
TEST(Fp8, ScaleOfNan) {
  cases::Case c = parsed("e4m3/b1/q300/k300/h1/d64/causal/blockscales");
  cases::ForwardTensors t = cases::make_forward_tensors(c);
  const auto params =
      cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view, t.extra.views());
  const ForwardProblem problem = to_problem(params);
  for (float* scales : {problem.k_scale.data, problem.v_scale.data}) {
    const float before = scales[1];
    scales[1] = std::nanf("");  // tokens 128 … 255
    for (const TestTarget& target : test_targets(problem.dtype)) {
      run_on(target, problem);
      for (int64_t i = 0; i < 300; ++i)
        for (int64_t d : {0, 63}) {
          const float x = load_float(problem.out.data, FLASH3_BFLOAT16, i * 64 + d);
          EXPECT_EQ(std::isnan(x), i >= 128) << target.name() << " row " << i;
        }
    }
    scales[1] = before;
  }
}

// Two keys of weights 1 and exp(−0.3): 256 · 0.741 = 189.7 is 192 to e4m3. lse knows nothing of it.
TEST(Fp8, WeightsAreRoundedAndTheirSumIsNot) {
  const cases::Case c = parsed("e4m3/b1/q1/k2/h1/d1/full/outfp32/scale0.3");
  const cases::ForwardTensors t = cases::make_forward_tensors(c);
  const auto set = [](const cases::GuardedTensor& tensor, int64_t i, float x) {
    store_float(tensor.view.data, FLASH3_FLOAT8_E4M3, i, x);
  };
  set(t.q, 0, 1.f);
  set(t.k, 0, 0.f);
  set(t.k, 1, -1.f);
  set(t.v, 0, 0.f);
  set(t.v, 1, 1.f);
  const ForwardProblem problem =
      to_problem(cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view));
  const double sum = 1 + std::exp(-0.3);
  for (const TestTarget& target : test_targets(problem.dtype)) {
    run_on(target, problem);
    EXPECT_NEAR(*static_cast<float*>(t.out.view.data), 0.75 / sum, 1e-6) << target.name();
    EXPECT_NEAR(*static_cast<float*>(t.lse.view.data), std::log(sum), 1e-6) << target.name();
  }
}

// compute = FP8 is flash3_quantize and the call on what it makes: the same bits.
TEST(ComputeFp8, IsBothCallsInOne) {
  for (const char* id :
       {"bf16/b2/q130/k257/h4x2/d96x40/causal/sink/fp8", "fp32/b1/q70/k128/h2/d33/full/fp8",
        "fp16/b3/q200/k200/h2/d64/causal/random/packed/fp8", "bf16/b1/q9/k0/h1/d8/full/fp8"}) {
    const cases::Case c = parsed(id);
    cases::ForwardTensors t = cases::make_forward_tensors(c),
                          other = cases::make_forward_tensors(c);
    auto params = cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view,
                                     t.extra.views());
    params.backend = FLASH3_BACKEND_CPU;
    size_t bytes = 0;
    ASSERT_EQ(flash3_forward_workspace(&params, &bytes), FLASH3_OK) << flash3_last_error();
    std::vector<unsigned char> memory(bytes + 256);
    const auto align = [](std::vector<unsigned char>& v) {
      return v.data() + (256 - reinterpret_cast<uintptr_t>(v.data()) % 256) % 256;
    };
    params.workspace = align(memory);
    params.workspace_size = bytes;
    ASSERT_EQ(flash3_forward(&params), FLASH3_OK) << flash3_last_error();

    auto again = cases::make_params(c, t.q.view, t.k.view, t.v.view, other.out.view, other.lse.view,
                                    t.extra.views());
    ForwardProblem problem = to_problem(again);
    std::vector<unsigned char> second(bytes + 256);
    problem.workspace = align(second);
    problem.workspace_size = bytes;
    const QuantizedForward both = quantized_forward(problem);
    ASSERT_TRUE(run_quantize(both.quantize, plan_quantize(both.quantize)).ok());
    ASSERT_TRUE(run_attention(both.forward, plan_attention(both.forward)).ok());
    EXPECT_EQ(t.out.bytes, other.out.bytes) << id;
    EXPECT_EQ(t.lse.bytes, other.lse.bytes) << id;
  }
}

}  // namespace
}  // namespace flash3::test
