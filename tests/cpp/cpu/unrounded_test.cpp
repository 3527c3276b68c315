// SPDX-License-Identifier: Apache-2.0
// Results of 16-bit tensors in float32: rounded, they are the bits of the 16-bit results.
#include <vector>

#include "cases/backward_tensors.hpp"
#include "core/convert.hpp"
#include "cpu/backward.hpp"
#include "harness.hpp"

namespace flash3::test {
namespace {

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
