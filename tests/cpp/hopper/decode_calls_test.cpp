// SPDX-License-Identifier: Apache-2.0
// Which calls the decode kernels run. Needs no GPU: a plan launches nothing.

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "cases/cache_tensors.hpp"
#include "cuda/sm90/decode/latent/partials.hpp"
#include "cuda/sm90/decode/latent/plan.hpp"
#include "oracle/yardsticks/yardsticks.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

// The error bound of weights over FP8 keys counts few queries as the kernels do.
static_assert(kFewQueries == kMostDecodeQueries);

TEST(DecodeCalls, RunsFewQueriesOfManyKeysAndOfCaches) {
  for (const char* id :
       {"bf16/b1/q1/k256/h1/d128/causal", "bf16/b64/q1/k4096/h64x8/d128/causal",
        "fp16/b1/q16/k4096/h8/d128/full", "bf16/b1/q4/k4096/h32x4/d64/causal",
        "bf16/b4/q1/k300/h16x1/d256/causal/usedk", "bf16/b1/q1/k300/h16x1/d192x128/full/softcap20",
        "bf16/b2/q16/k20/h4/d128/causal/usedk/paged16", "bf16/b2/q1/k1/h4/d33/full/usedk/leftpad",
        "bf16/b8/q16/k300/h8/d128/causal/packedq/usedk/paged16", "e4m3/b1/q1/k4096/h8/d128/causal",
        "e4m3/b4/q16/k256/h16x2/d128/causal/usedk/headscales"})
    EXPECT_TRUE(is_decode(problem_of(id))) << id;
  for (const char* id :
       {"bf16/b1/q1/k255/h1/d128/causal", "bf16/b1/q17/k4096/h8/d128/full",
        "bf16/b2/q17/k300/h8/d128/full/usedk/paged16", "e4m3/b1/q1/k255/h8/d128/causal",
        "e4m3/b1/q17/k4096/h8/d128/causal", "e4m3/b1/q1/k4096/h8/d128/causal/sums1",
        "fp32/b1/q1/k4096/h8/d128/causal", "bf16/b2/q4096/k4096/h8/d128/causal"})
    EXPECT_FALSE(is_decode(problem_of(id))) << id;
}

// A sequence has the same bits paged or not, with one query or sixteen, beside any others: which
// kernels run it must not follow from heads, batch, or how a cache is stored.
TEST(DecodeCalls, TheNumberOfQueriesDecidesAlone) {
  for (const char* heads : {"h1", "h4x1", "h64x1", "h32x8"})
    for (const char* cache : {"", "/usedk", "/usedk/batchidx", "/usedk/leftpad", "/usedk/paged16",
                              "/usedk/paged3", "/usedk/paged256"}) {
      const std::string id = std::string("bf16/b1/q1/k256/") + heads + "/d64/causal" + cache;
      ForwardProblem problem = problem_of(id);
      for (const int64_t batch : {1, 256})
        for (const int64_t queries : {1, 2, 16}) {
          problem.batch = batch;
          problem.seq_q = problem.sequences_q.rows = problem.sequences_q.max_length = queries;
          EXPECT_TRUE(is_decode(problem)) << id << ", " << batch << ", " << queries;
        }
    }
}

// Packed queries without max_seqlen_q count as many: the host does not know how many are one
// sequence's.
TEST(DecodeCalls, UnknownNumbersOfQueriesAreMany) {
  for (const char* id : {"bf16/b2/q1/k300/h8/d128/causal/packedq/nomax/usedk/paged16",
                         "bf16/b2/q1/k300/h8/d128/causal/packedq/nomax"})
    EXPECT_FALSE(is_decode(problem_of(id))) << id;
  EXPECT_TRUE(is_decode(problem_of("bf16/b2/q1/k200/h8/d128/causal/packedk/nomax")));
}

// Where no TMA box lies in one page, or none at all: slow, but right, and `explain` says so.
TEST(DecodeCalls, RunsManyQueriesOfCachesThatTheForwardKernelsCannotRead) {
  for (const auto& [id, why] : {
           std::pair{"bf16/b2/q500/k20/h4/d128/causal/usedk/paged3", "pages have too few rows"},
           {"bf16/b2/q500/k20/h4/d128/causal/usedk/paged8", "pages have too few rows"},
           {"bf16/b2/q500/k20/h4/d128/causal/usedk/paged24", "pages have too few rows"},
           {"bf16/b2/q500/k20/h4/d128/causal/usedk/paged64/leftpad", "padding moves keys"},
           {"bf16/b2/q500/k20/h4/d33/causal/usedk/paged64", "TMA needs"},
           {"bf16/b2/q500/k20/h4/d33/causal/usedk/batchidx", "TMA needs"},
           {"e4m3/b2/q500/k20/h4/d72/causal/usedk/paged64", "TMA needs"},
           {"e4m3/b2/q500/k20/h4/d64/causal/usedk/paged8", "pages have too few rows"},
           {"e4m3/b2/q500/k20/h4/d64/causal/usedk/paged64/blockscales", "scales of blocks begin"},
           {"bf16/b2/q500/k20/h4/d64/causal/usedk/paged64/kv8/blockscales",
            "scales of blocks begin"},
           {"bf16/b2/q500/k20/h4/d64/causal/usedk/paged64/kv8/softcap9", "none caps the scores"},
           {"bf16/b2/q500/k20/h4/d64/causal/kv8", "k and v are FP8 and no cache"},
           {"bf16/b2/q500/k20/h4/d64/causal/packed/kv8", "k and v are FP8 and no cache"},
       }) {
    const ForwardProblem problem = problem_of(id);
    EXPECT_TRUE(is_decode(problem)) << id;
    const std::string text = explained(problem);
    EXPECT_NE(text.find(std::string("the forward kernels cannot read k and v: ") + why),
              std::string::npos)
        << id << ": " << text;
  }
}

// Calls without a query only append, whatever seq_q says.
TEST(DecodeCalls, RunsAppendsWithoutQueries) {
  ForwardProblem problem = problem_of("bf16/b2/q500/k20/h4/d128/causal/usedk/paged16/append2");
  EXPECT_FALSE(is_decode(problem));
  problem.heads_q = 0;
  ASSERT_FALSE(problem.has_output());
  EXPECT_TRUE(is_decode(problem));
  EXPECT_FALSE(steps_of(problem).decode);
}

// No other kernel may take such a call: it would compute without the mask.
TEST(DecodeCalls, MasksThatNoKernelWalksAreRefused) {
  const auto refusal = [](const std::string& id) {
    PlannedSteps steps;
    const Status status = plan(problem_of(id), kDevice, &steps.workspace_bytes, &steps);
    EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED) << id;
    return status.message();
  };
  for (const std::string queries : {"q2", "q255"})
    EXPECT_EQ(
        refusal("bf16/b1/" + queries + "/k576/h1/d128/full/kv8/mask:blocks64x24"),
        "mask is given and q.dtype = bfloat16 but k and v are float8_e4m3; the hopper backend "
        "takes a mask where q, k and v are of one dtype");
  EXPECT_EQ(refusal("e4m3/b1/q200/k300/h2/d64/full/softcap20/mask:dense"),
            "mask is given and softcap is given but k and v are FP8; the hopper backend caps the "
            "scores of a call with a mask for float16 and bfloat16 keys only");
}

// What the latent kernels run. Needs no GPU: a plan launches nothing.

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
