// SPDX-License-Identifier: Apache-2.0
// What the latent kernels run. Needs no GPU: a plan launches nothing.
#include <gtest/gtest.h>

#include <string>

#include "cuda/sm90/decode/latent/partials.hpp"
#include "cuda/sm90/decode/latent/plan.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

PlannedDecode plan_of(const std::string& id) {
  const ForwardProblem problem = problem_of(id);
  EXPECT_TRUE(is_decode(problem)) << id;
  EXPECT_TRUE(check_latent(problem).ok()) << id << ": " << check_latent(problem).message();
  PlannedDecode plan;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_TRUE(status.ok()) << id << ": " << status.message();
  return plan;
}

TEST(LatentPlan, RunsBothFormsWhateverTheQueriesAre) {
  for (const char* id : {"bf16/b2/q1/k300/h128x1/d576x512/causal/usedk/paged64/latent",
                         "bf16/b2/q1/k300/h128x1/d64x512/causal/usedk/paged64/qv",
                         "bf16/b1/q500/k600/h16x1/d576x512/causal/latent",
                         "bf16/b3/q4/k300/h16x1/d64x512/full/packedq/usedk/qv/softcap20/sink"})
    EXPECT_EQ(plan_of(id).kernel->id, "decode_bf16_latent_64x64") << id;
  EXPECT_EQ(plan_of("fp16/b1/q1/k100/h8x1/d64x512/full/qv").kernel->id, "decode_fp16_latent_64x64");
}

// Two blocks of a cluster have 64 heads each, whether TMA brings the keys or they are gathered.
TEST(LatentPlan, ClustersShareTheKeysOfTwoGroupsOfHeads) {
  const PlannedDecode both =
      plan_of("bf16/b8/q1/k4096/h128x1/d576x512/causal/usedk/paged64/latent");
  EXPECT_EQ(both.cluster, 2);
  EXPECT_EQ(both.heads, 64);
  EXPECT_EQ(both.groups_per_kv, 1);
  EXPECT_EQ(both.rule.head_groups, 1);
  EXPECT_EQ(both.grid, kDevice.multiprocessors / 2 * 2);
  EXPECT_EQ(both.slots, kLatentSlots);
  EXPECT_EQ(plan_of("bf16/b8/q1/k4096/h128x1/d576x512/causal/usedk/paged16/latent").cluster, 2);
  for (const char* id : {"bf16/b8/q1/k4096/h64x1/d576x512/causal/usedk/paged64/latent",
                         "bf16/b8/q1/k4096/h192x1/d576x512/causal/usedk/paged64/latent"})
    EXPECT_EQ(plan_of(id).cluster, 1) << id;
}

TEST(LatentPlan, ViewsAreThePartsOfKeysAndQueries) {
  ForwardProblem problem = problem_of("bf16/b2/q1/k300/h4x1/d576x512/full/latent");
  alignas(16) static char memory[2];
  problem.q.data = problem.k.data = problem.v.data = memory;
  const LatentViews views = latent_views(problem, problem.q);
  EXPECT_EQ(views.k_latent.data, memory);
  EXPECT_EQ(views.k_rope.data, memory + 512 * 2);
  EXPECT_EQ(views.q_rope.data, memory + 512 * 2);
  EXPECT_EQ(views.q_latent.dim, 512);
  EXPECT_EQ(views.k_rope.dim, 64);
}

TEST(LatentPlan, OtherWideHeadsAreRefusedByName) {
  const auto answer = [](const char* id) { return check_latent(problem_of(id)); };
  for (const char* id :
       {"bf16/b1/q1/k300/h4x1/d320/full", "bf16/b1/q1/k300/h4x1/d64x300/full/qv"}) {
    EXPECT_EQ(answer(id).code(), FLASH3_UNSUPPORTED) << id;
    EXPECT_NE(answer(id).message().find("of latent attention head_dim = 64 with qv, or 576"),
              std::string::npos)
        << answer(id).message();
  }
  const Status apart = answer("bf16/b1/q1/k300/h4x1/d576x512/full");
  EXPECT_EQ(apart.code(), FLASH3_UNSUPPORTED);
  EXPECT_NE(apart.message().find("v is not the first 512 elements of the rows of k"),
            std::string::npos)
      << apart.message();
  EXPECT_TRUE(answer("bf16/b1/q1/k300/h4x1/d256/full").ok());
}

}  // namespace
}  // namespace flash3::cuda::sm90
