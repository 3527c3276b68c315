// SPDX-License-Identifier: Apache-2.0
// Runs the CPU attention below the C interface, where a test may choose the instruction set.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cases/check.hpp"
#include "cases/tensors.hpp"
#include "cpu/attention.hpp"
#include "cpu/backward.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::cpu {
#if defined(__x86_64__)
extern const AttentionKernel kEmulatedAmxKernel;  // these need what kAvx3Zen4 needs
extern const BackwardKernel kEmulatedAmxBackward;
#endif
}  // namespace flash3::cpu

namespace flash3::test {

using namespace cpu;  // what is tested here

// A kernel to test: an instruction set of this machine, or AMX with emulated tiles.
struct TestTarget {
  CpuTarget target;
  bool emulated = false;
  std::string name() const {
    return target_name(target) + std::string(emulated ? " emulated" : "");
  }
};

inline std::vector<TestTarget> test_targets(flash3_dtype dtype) {
  std::vector<TestTarget> all;
  for (const CpuTarget target : supported_targets()) {
    if (target == CpuTarget::kAmx && dtype != FLASH3_BFLOAT16) continue;
    all.push_back({target});
    if (target == CpuTarget::kAvx3Zen4 && dtype == FLASH3_BFLOAT16)
      all.push_back({CpuTarget::kAmx, true});
  }
  return all;
}

// The same for the backward: what comes after kAvx3 is for bfloat16 alone.
inline std::vector<TestTarget> backward_targets(flash3_dtype dtype) {
  std::vector<TestTarget> all;
  for (const TestTarget& target : test_targets(dtype))
    if (dtype == FLASH3_BFLOAT16 || target.target <= CpuTarget::kAvx3) all.push_back(target);
  return all;
}

inline BackwardPlan plan_backward_on(const TestTarget& on, const BackwardProblem& problem) {
  BackwardPlan plan = plan_backward(problem, on.target);
#if defined(__x86_64__)
  if (on.emulated) plan.kernel = &kEmulatedAmxBackward;
#endif
  return plan;
}

inline ForwardProblem to_problem(const flash3_forward_params& params) {
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kRequired, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

// A workspace full of the fill pattern, with guard bytes after it.
class Workspace {
 public:
  explicit Workspace(size_t size) : size_(size), bytes_(size + kGuard, kFillPattern) {}
  void* data() { return bytes_.data(); }
  bool guard_is_intact() const {
    for (size_t i = size_; i < bytes_.size(); ++i)
      if (bytes_[i] != kFillPattern) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 512;
  static constexpr unsigned char kFillPattern = 0xFF;  // four of them: a NaN
  size_t size_;
  std::vector<unsigned char> bytes_;
};

// Computes out and lse of the problem with this instruction set.
inline AttentionPlan run_on(const TestTarget& on, ForwardProblem problem) {
  AttentionPlan plan = plan_attention(problem, on.target);
#if defined(__x86_64__)
  if (on.emulated) plan.kernel = &kEmulatedAmxKernel;
#endif
  Workspace workspace(plan.workspace_size);
  problem.workspace = workspace.data();
  problem.workspace_size = plan.workspace_size;
  const Status status = run_attention(problem, plan);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(workspace.guard_is_intact());
  return plan;
}

// Runs a case on every instruction set of this machine and checks out, lse and what lies around
// them.
inline void check_case(const cases::Case& c, int num_threads) {
  cases::ForwardTensors t = cases::make_forward_tensors(c);
  const auto params =
      cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view, t.extra.views());
  const ForwardProblem problem = to_problem(params);

  cases::ForwardTensors naive;
  if (needs_naive(c)) {
    naive = cases::make_forward_tensors(c);
    attention_naive(to_problem(cases::make_params(c, t.q.view, t.k.view, t.v.view, naive.out.view,
                                                  naive.lse.view, t.extra.views())),
                    0, t.extra.mask_pairs());
  }
  const ReferenceForward ref = attention_ref(problem, 0, t.extra.mask_pairs());
  const cases::ForwardTensors untouched = t;

  for (const TestTarget& target : test_targets(problem.dtype)) {
    SCOPED_TRACE(to_id(c) + " on " + target.name());
    t.out.bytes.assign(untouched.out.bytes.begin(), untouched.out.bytes.end());
    t.lse.bytes.assign(untouched.lse.bytes.begin(), untouched.lse.bytes.end());
    ForwardProblem run = problem;
    run.num_threads = num_threads;
    run_on(target, run);
    EXPECT_EQ(check_out(c, t.out.view, ref, {}, naive.out.view).failure, "");
    EXPECT_EQ(t.out.damage(), "");
    if (c.want_lse) {
      EXPECT_EQ(check_lse(c, t.lse.view, ref, {}, naive.lse.view).failure, "");
      EXPECT_EQ(t.lse.damage(), "");
    }
  }
}

inline void check_case(const std::string& id, int num_threads) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  ASSERT_TRUE(c) << error;
  check_case(*c, num_threads);
}

}  // namespace flash3::test
