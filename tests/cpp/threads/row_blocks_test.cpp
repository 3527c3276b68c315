// SPDX-License-Identifier: Apache-2.0
// The CPU backward's blocks of rows, which threads sum up side by side, on every instruction set:
// strips of AMX are longer than a block's last rows, and must leave the next block's alone. That
// seldom changes a bit; ThreadSanitizer (threads_test_sanitized) sees it each time.
#include <gtest/gtest.h>

#include <string>

#include "../cpu/harness.hpp"
#include "cases/backward_tensors.hpp"

namespace flash3::test {
namespace {

TEST(RowBlocks, BelongToOneThreadAtATime) {
  for (const std::string id :
       {"bf16/b1/q300/k1100/h1/d64/full/bwd", "bf16/b2/q70/k600/h2/d32/causal/bwd"}) {
    std::string error;
    const auto c = cases::parse_id(id, &error);
    ASSERT_TRUE(c) << error;
    cases::BackwardTensors tensors = cases::make_backward_tensors(*c);
    const flash3_backward_params params = cases::make_backward_params(*c, tensors.views());
    BackwardProblem problem;
    ASSERT_TRUE(make_backward_problem(&params, Pointers::kRequired, &problem).ok());
    for (const TestTarget& target : backward_targets(problem.dtype)) {
      std::vector<std::byte> alone;
      for (const int threads : {1, 2, 3, 5, 7, 16}) {
        problem.num_threads = threads;
        const BackwardPlan plan = plan_backward_on(target, problem);
        Workspace workspace(plan.workspace_size + 64);
        BackwardProblem run = problem;
        const auto address = reinterpret_cast<uintptr_t>(workspace.data());
        run.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
        run.workspace_size = plan.workspace_size;
        ASSERT_TRUE(run_backward(run, plan).ok());
        if (threads == 1) alone.assign(tensors.dq.bytes.begin(), tensors.dq.bytes.end());
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), tensors.dq.bytes.begin()))
            << id << " on " << target.name() << ", " << threads << " threads";
      }
    }
  }
}

}  // namespace
}  // namespace flash3::test
