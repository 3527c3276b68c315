// SPDX-License-Identifier: Apache-2.0
// flash3_merge on the CPU, against the formula of merge.h in float64.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "cases/tensors.hpp"
#include "core/convert.hpp"
#include "cpu/backward.hpp"
#include "flash3/flash3.hpp"
#include "harness.hpp"

namespace flash3::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct MergeSpec {
  int64_t parts = 3, rows = 5, heads = 4, dim = 40;
  flash3_dtype dtype = FLASH3_FLOAT32;
  bool sink = false, lse = true;
  int threads = 2;
};

// Part s of row i and head h saw no key where their sum is divisible; row 0 saw none at all.
void check(const MergeSpec& c) {
  const auto count = static_cast<size_t>(c.rows * c.heads);
  std::vector<float> parts(static_cast<size_t>(c.parts * c.rows * c.heads * c.dim)), sink;
  std::vector<float> lses(static_cast<size_t>(c.parts) * count), lse(count, -7.f);
  std::vector<std::byte> out(count * static_cast<size_t>(c.dim) * 4, std::byte{0xFF});
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = cases::normal_value(1, i);
  for (int64_t s = 0; s < c.parts; ++s)
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t i = 0; i < c.rows; ++i) {
        const bool unseen = i == 0 || (s + h + i) % 4 == 0;
        const auto at = static_cast<size_t>((s * c.heads + h) * c.rows + i);
        lses[at] = unseen ? -kInfinity : 20 * cases::normal_value(2, at);
        for (int64_t d = 0; unseen && d < c.dim; ++d)
          parts[static_cast<size_t>(((s * c.rows + i) * c.heads + h) * c.dim + d)] = kNan;
      }
  for (int64_t h = 0; h < c.heads; ++h)
    sink.push_back(h == 1 ? -kInfinity : cases::normal_value(3, static_cast<uint64_t>(h)));

  merge({.out_parts = tensor(parts.data(), FLASH3_FLOAT32, {c.parts, c.rows, c.heads, c.dim}),
         .lse_parts = lse_tensor(lses.data(), c.parts, c.heads, c.rows),
         .out = packed_tensor(out.data(), c.dtype, {c.rows, c.heads, c.dim}),
         .lse = c.lse ? packed_lse_tensor(lse.data(), c.heads, c.rows) : Tensor{},
         .sink = c.sink ? sink_tensor(sink.data(), FLASH3_FLOAT32, c.heads) : Tensor{},
         .backend = FLASH3_BACKEND_CPU,
         .num_threads = c.threads});

  const double step = c.dtype == FLASH3_FLOAT32    ? 1e-6
                      : c.dtype == FLASH3_BFLOAT16 ? std::exp2(-8)
                                                   : std::exp2(-11);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t h = 0; h < c.heads; ++h) {
      double sum = c.sink ? std::exp(double{sink[static_cast<size_t>(h)]}) : 0;
      std::vector<double> want(static_cast<size_t>(c.dim));
      for (int64_t s = 0; s < c.parts; ++s) {
        const float of_part = lses[static_cast<size_t>((s * c.heads + h) * c.rows + i)];
        if (of_part == -kInfinity) continue;
        sum += std::exp(double{of_part});
        for (int64_t d = 0; d < c.dim; ++d)
          want[static_cast<size_t>(d)] +=
              std::exp(double{of_part}) *
              double{parts[static_cast<size_t>(((s * c.rows + i) * c.heads + h) * c.dim + d)]};
      }
      for (int64_t d = 0; d < c.dim; ++d) {
        const double exact = sum == 0 ? 0 : want[static_cast<size_t>(d)] / sum;
        const float got = load_float(out.data(), c.dtype, (i * c.heads + h) * c.dim + d);
        ASSERT_NEAR(got, exact, step * std::abs(exact) + 1e-5) << "row " << i << ", head " << h;
      }
      const float got = lse[static_cast<size_t>(h * c.rows + i)];
      if (!c.lse)
        ASSERT_EQ(got, -7.f);
      else if (sum == 0)
        ASSERT_EQ(got, -kInfinity);
      else
        ASSERT_NEAR(got, std::log(sum), 1e-5) << "row " << i << ", head " << h;
    }
}

TEST(Merge, IsTheFormula) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16})
    for (const bool sink : {false, true}) {
      check({.dtype = dtype, .sink = sink});
      check({.parts = 1, .rows = 1, .dtype = dtype, .sink = sink});
      check({.parts = 70, .rows = 40, .heads = 3, .dim = 1, .dtype = dtype, .sink = sink});
      check({.rows = 33, .heads = 9, .dim = 256, .dtype = dtype, .sink = sink, .lse = false});
      check({.parts = 3, .rows = 5, .heads = 2, .dim = 512, .dtype = dtype, .sink = sink});
    }
}

TEST(Merge, NoPartsAreRowsThatSawNothing) {
  for (const bool sink : {false, true}) check({.parts = 0, .sink = sink});
}

// Largest and smallest scores, which must not overflow, and NaN, which must stay.
TEST(Merge, SpecialValues) {
  std::vector<float> parts{1.f, 2.f, 3.f, 4.f}, lses{1e30f, kNan, 1e30f, 5.f}, out(2), lse(2);
  const Merge args{.out_parts = tensor(parts.data(), FLASH3_FLOAT32, {2, 2, 1, 1}),
                   .lse_parts = lse_tensor(lses.data(), 2, 1, 2),
                   .out = packed_tensor(out.data(), FLASH3_FLOAT32, {2, 1, 1}),
                   .lse = packed_lse_tensor(lse.data(), 1, 2),
                   .backend = FLASH3_BACKEND_CPU};
  merge(args);
  EXPECT_EQ(out[0], 2.f);
  EXPECT_EQ(lse[0], 1e30f);
  EXPECT_TRUE(std::isnan(out[1]) && std::isnan(lse[1]));
}

// Results of 16-bit tensors in float32: rounded, they are the bits of the 16-bit results.

cases::Case parse(const std::string& id) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  EXPECT_TRUE(c) << id << ": " << error;
  return c.value();
}

// A tensor of the same shape in float32, with the fill pattern in it.
cases::GuardedTensor in_float32(const flash3_tensor& like) {
  return cases::make_tensor(FLASH3_FLOAT32, like.shape[0], like.shape[1], like.shape[2],
                            like.shape[3], cases::Layout::kOdd);
}

// Every element of `rounded` is that of `wide`, rounded; and some are not the same number.
void expect_rounded(const flash3_tensor& rounded, const flash3_tensor& wide) {
  ASSERT_EQ(wide.dtype, FLASH3_FLOAT32);
  int64_t rows = 0, differ = 0;
  std::vector<int64_t> offsets;
  cases::for_each_row(wide, [&](int64_t offset) { offsets.push_back(offset); });
  cases::for_each_row(rounded, [&](int64_t offset) {
    for (int64_t d = 0; d < rounded.shape[rounded.ndim - 1]; ++d) {
      const float exact =
          load_float(wide.data, FLASH3_FLOAT32, offsets[static_cast<size_t>(rows)] + d);
      const float got = load_float(rounded.data, rounded.dtype, offset + d);
      uint32_t bits = 0;  // room for any dtype
      store_float(&bits, rounded.dtype, 0, exact);
      ASSERT_EQ(got, load_float(&bits, rounded.dtype, 0)) << "row " << rows << ", " << d;
      differ += got != exact;
    }
    ++rows;
  });
  EXPECT_EQ(rows, static_cast<int64_t>(offsets.size()));
  EXPECT_GT(differ, 0);
}

class Unrounded : public testing::TestWithParam<const char*> {};

TEST_P(Unrounded, Forward) {
  const cases::Case c = parse(GetParam());
  cases::ForwardTensors t = cases::make_forward_tensors(c);
  auto params =
      cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view, t.extra.views());
  const ForwardProblem problem = to_problem(params);
  cases::GuardedTensor wide = in_float32(t.out.view);
  params.out = wide.view;
  const ForwardProblem unrounded = to_problem(params);
  for (const TestTarget& target : test_targets(problem.dtype)) {
    SCOPED_TRACE(target.name());
    run_on(target, problem);
    wide.fill_pattern();
    run_on(target, unrounded);
    EXPECT_EQ(wide.damage(), "");
    expect_rounded(t.out.view, wide.view);
  }
}

Status run_backward_on(CpuTarget target, BackwardProblem problem) {
  const BackwardPlan plan = plan_backward(problem, target);
  Workspace workspace(plan.workspace_size + 64);
  problem.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  problem.workspace_size = plan.workspace_size;
  return run_backward(problem, plan);
}

TEST_P(Unrounded, Gradients) {
  const cases::Case c = parse(GetParam() + std::string("/bwd"));
  cases::BackwardTensors t = cases::make_backward_tensors(c);
  auto params = cases::make_backward_params(c, t.views());
  BackwardProblem problem, unrounded;
  ASSERT_TRUE(make_backward_problem(&params, Pointers::kRequired, &problem).ok());
  cases::GuardedTensor dq = in_float32(t.dq.view), dk = in_float32(t.dk.view);
  cases::GuardedTensor dv = in_float32(t.dv.view);
  params.dq = dq.view, params.dk = dk.view, params.dv = dv.view;
  ASSERT_TRUE(make_backward_problem(&params, Pointers::kRequired, &unrounded).ok());
  for (const CpuTarget target : supported_targets()) {
    SCOPED_TRACE(target_name(target));
    ASSERT_TRUE(run_backward_on(target, problem).ok());
    ASSERT_TRUE(run_backward_on(target, unrounded).ok());
    for (auto* wide : {&dq, &dk, &dv}) EXPECT_EQ(wide->damage(), "");
    expect_rounded(t.dq.view, dq.view);
    expect_rounded(t.dk.view, dk.view);
    expect_rounded(t.dv.view, dv.view);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Unrounded,
                         testing::Values("bf16/b2/q70/k90/h4x2/d64/causal",
                                         "fp16/b1/q33/k41/h3/d40x72/w5:3",
                                         "bf16/b1/q130/k9/h2/d31/causal",
                                         "fp16/b1/q64/k64/h1/d128/full"));

}  // namespace
}  // namespace flash3::test
