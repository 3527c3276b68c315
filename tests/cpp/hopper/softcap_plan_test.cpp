// SPDX-License-Identifier: Apache-2.0
// What the Hopper backend plans for calls with a softcap: which kernels, and which softcaps it
// leaves to others. Needs no GPU: a plan launches nothing.
#include <gtest/gtest.h>

#include "cases/backward_tensors.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "device/planned_forward.hpp"
#include "forward_problem.hpp"

namespace flash3::cuda::sm90 {
namespace {

Status plan_of(const std::string& id, PlannedForward* plan) {
  return cuda::sm90::plan(problem_of(id), kDevice, plan);
}

Status plan_of(const std::string& id, BackwardPlan* plan) {
  const auto params = cases::make_backward_question(cases::parsed(id + "/bwd"));
  BackwardProblem problem;
  EXPECT_TRUE(make_backward_problem(&params, Pointers::kOptional, &problem).ok()) << id;
  size_t workspace = 0;
  return cuda::sm90::plan(problem, kDevice, &workspace, plan);
}

// The kernel id of the plan; its end says the tile.
template <class Plan>
std::string kernel_of(const std::string& id) {
  Plan plan;
  const Status status = plan_of(id, &plan);
  EXPECT_TRUE(status.ok()) << id << ": " << status.message();
  return plan.kernel ? plan.kernel->id : "";
}

constexpr const char* kMasks[] = {"full", "causal", "w100:50", "causal/chunk64"};

// The next larger head dim that has one, under any mask, ragged or not.
TEST(SoftcapPlan, TakesTheKernelOfTheSoftcap) {
  for (const std::string dtype : {"fp16", "bf16"})
    for (const char* mask : kMasks)
      for (const char* ragged : {"", "/packed"})
        for (const auto& [dims, kernel_dim, backward] : {std::tuple{"1", "64", "96x128"},
                                                         {"64", "64", "96x128"},
                                                         {"33x64", "64", "96x128"},
                                                         {"65", "128", "64x128"},
                                                         {"64x65", "128", "64x128"},
                                                         {"128x1", "128", "64x128"},
                                                         {"129", "256", "64x64"},
                                                         {"192x128", "256", "64x64"},
                                                         {"256", "256", "64x64"}}) {
          const std::string id =
              dtype + "/b1/q300/k300/h2/d" + dims + "/" + mask + "/softcap30" + ragged;
          const std::string name = dtype + "_d" + kernel_dim + "_softcap_";
          EXPECT_EQ(kernel_of<PlannedForward>(id).find("fwd_" + name), 0u) << id;
          EXPECT_EQ(kernel_of<BackwardPlan>(id), "bwd_" + name + backward) << id;
        }
}

TEST(SoftcapPlan, TakesTheTileOfTheLength) {
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b1/q16384/k16384/h32/d64/causal/softcap50"),
            "fwd_bf16_d64_softcap_192x128");
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b16/q1024/k1024/h32/d64/causal/softcap50"),
            "fwd_bf16_d64_softcap_256x64");
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b16/q1024/k1024/h16/d128/full/softcap50"),
            "fwd_bf16_d128_softcap_128x128");
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b16/q1024/k1024/h16/d128/full"),
            "fwd_bf16_d128_full_128x128");
  EXPECT_EQ(kernel_of<BackwardPlan>("bf16/b1/q8192/k100/h2/d128/full/softcap30"),
            "bwd_bf16_d128_softcap_80x128");
}

// Short sequences share the tiles of softcap kernels too, and never those of another kind.
TEST(SoftcapPlan, ShortSequencesShareTiles) {
  for (const char* dims : {"64", "96", "128", "192x128", "256"})
    for (const char* mask : kMasks)
      for (const char* softcap : {"", "/softcap30"}) {
        const std::string id =
            std::string("bf16/b1000/q16/k16/h8x2/d") + dims + "/" + mask + "/packed" + softcap;
        const ForwardProblem problem = problem_of(id);
        int with_slots = 0;
        for (const ForwardChoice& choice : forward_choices(problem)) {
          EXPECT_EQ(choice.kernel->config.score == ScoreKind::kSoftcap, softcap[0] != '\0') << id;
          with_slots += choice.slot_rows == 16;
        }
        EXPECT_EQ(with_slots, 1) << id;
        PlannedForward plan;
        ASSERT_TRUE(cuda::sm90::plan(problem, kDevice, &plan).ok()) << id;
        EXPECT_EQ(plan.slot_rows, 16) << id;
      }
}

// The cap's coefficients are normal numbers for softcaps within these bounds alone.
TEST(SoftcapPlan, SaysWhichSoftcapsItDoesNotCompute) {
  const auto refusal = [](const std::string& option) {
    const std::string id = "bf16/b2/q64/k64/h2/d64/full/" + option;
    PlannedForward forward;
    BackwardPlan backward;
    const Status status = plan_of(id, &forward);
    EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED) << option;
    EXPECT_EQ(plan_of(id, &backward).message(), status.message());
    return status.message();
  };
  EXPECT_EQ(refusal("softcap1e7"),
            "softcap = 1e+07 with softmax_scale = 0.125 but the hopper backend takes softcap and "
            "softmax_scale / softcap from 1e-06 to 1e+06");
  EXPECT_EQ(refusal("softcap1e-7").substr(0, 15), "softcap = 1e-07");
  EXPECT_EQ(refusal("softcap1e5/scale0.01").substr(0, 44),
            "softcap = 1e+05 with softmax_scale = 0.01 bu");
}

}  // namespace
}  // namespace flash3::cuda::sm90
