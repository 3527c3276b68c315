// SPDX-License-Identifier: Apache-2.0
// Which calls with a mask of documents the Hopper backend plans as packed batches. Needs no GPU.

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "cuda/sm90/documents.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

template <class Steps>
struct Planned {
  OfDocuments<Steps> steps;
  size_t workspace = 0;
  std::string text;  // explained

  explicit Planned(const auto& problem) {
    const Status status = plan(problem, kDevice, &workspace, &steps);
    EXPECT_TRUE(status.ok()) << status.message();
    Explanation lines;
    explain(problem, steps, &lines);
    text = lines.text();
  }
};
using Forward = Planned<ForwardSteps>;
using Backward = Planned<BackwardPlan>;

// A call of one sequence with a mask of so many documents, of which nothing has memory.
template <class P>
P of_documents(P problem, int64_t documents) {
  EXPECT_TRUE(problem.mask_lists.given);
  problem.mask_lists.documents = documents;
  return problem;
}
constexpr char kCall[] = "bf16/b1/q4096/k4096/h4x2/d128/causal/mask:documents";

TEST(DocumentsPlan, LongOnesRunAsAPackedBatch) {
  for (const std::string rest :
       {"d128/causal", "d64/full", "d256/w300:20", "d96x40/causal/softcap20"}) {
    const std::string id = "bf16/b1/q4096/k4096/h4x2/" + rest + "/mask:documents";
    const auto problem = of_documents(problem_of(id), 9);
    const Forward forward(problem);
    ASSERT_TRUE(forward.steps.packed && forward.steps.steps.forward) << id;
    const ForwardConfig& c = forward.steps.steps.forward->kernel->config;
    EXPECT_FALSE(c.lists || c.paged || c.split) << id;
    EXPECT_EQ(forward.steps.steps.forward->rows, RowIndexing::kRagged) << id;
    EXPECT_NE(forward.text.find("up to 9 sequences"), std::string::npos) << forward.text;
    const Backward backward(of_documents(backward_problem_of(id), 9));
    ASSERT_TRUE(backward.steps.packed) << id;
    EXPECT_FALSE(backward.steps.steps.kernel->config.lists) << id;
    EXPECT_NE(backward.text.find("up to 9 sequences"), std::string::npos) << backward.text;
  }
}

// The kernels are those of cu_seqlens, whose lengths are not known on the host either.
TEST(DocumentsPlan, TheyRunAsCuSeqlensDo) {
  const Forward forward(of_documents(problem_of(kCall), 9));
  const Backward backward(of_documents(backward_problem_of(kCall), 9));
  const std::string packed = "bf16/b10/q4096/k4096/h4x2/d128/causal/packed/lognormal4096:1/nomax";
  EXPECT_EQ(forward.steps.steps.forward->kernel, steps_of(problem_of(packed)).forward->kernel);
  EXPECT_EQ(backward.steps.steps.kernel, plan_of(packed).kernel);
}

TEST(DocumentsPlan, OthersWalkLists) {
  const auto packs = [](const std::string& id, int64_t documents) {
    return Forward(of_documents(problem_of(id), documents)).steps.packed;
  };
  EXPECT_TRUE(packs(kCall, 16));
  EXPECT_FALSE(packs(kCall, 17));  // short ones
  EXPECT_FALSE(packs(kCall, 0));   // nobody says where they begin
  EXPECT_FALSE(packs("bf16/b1/q2047/k2047/h4x2/d128/causal/mask:documents", 1));
  EXPECT_TRUE(packs("bf16/b1/q2048/k2048/h4x2/d128/causal/mask:documents", 1));
  EXPECT_FALSE(packs("bf16/b2/q4096/k4096/h4x2/d128/causal/mask:documents", 4));
  EXPECT_FALSE(packs("e4m3/b1/q4096/k4096/h4x2/d128/causal/mask:documents", 4));
  EXPECT_FALSE(packs("bf16/b1/q4096/k4096/h4x2/d128/causal/mask:documents/alibi_slopes=heads", 4));
}

// Each tile of queries of a packed batch has a place for its dQ: as many as there is room for
// documents, which are few where they are long.
TEST(DocumentsPlan, TheBackwardsWorkspaceStaysSmall) {
  const Backward lists(of_documents(backward_problem_of(kCall), 0));
  const Backward packed(of_documents(backward_problem_of(kCall), 16));
  EXPECT_GT(packed.workspace, lists.workspace);
  EXPECT_LT(packed.workspace, lists.workspace * 3 / 2);
}

}  // namespace
}  // namespace flash3::cuda::sm90
