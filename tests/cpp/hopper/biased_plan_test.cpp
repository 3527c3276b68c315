// SPDX-License-Identifier: Apache-2.0
// Which kernels FP8 calls with slopes and tables run in, and what is refused. Needs no GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cases/added_tensors.hpp"
#include "cases/table.hpp"
#include "core/quantized_forward.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

std::string kernel(const std::string& id) {
  const PlannedSteps steps = steps_of(problem_of(id));
  EXPECT_TRUE(steps.forward && !steps.decode) << id;
  return steps.forward ? steps.forward->kernel->id : "";
}

TEST(BiasedFp8, TakesTheKernelOfItsTerms) {
  const std::string call = "e4m3/b2/q200/k300/h4x2/", slopes = "/alibi_slopes=heads",
                    table = "/bias_table=hd";
  EXPECT_EQ(kernel(call + "d64/causal" + slopes), "fwd_e4m3_d64_slopes_192x128");
  EXPECT_EQ(kernel(call + "d64/full" + table), "fwd_e4m3_d64_table_128x128");
  EXPECT_EQ(kernel(call + "d128/w9:4" + slopes), "fwd_e4m3_d128_slopes_128x128");
  EXPECT_EQ(kernel(call + "d128/causal/chunk50" + table), "fwd_e4m3_d128_table_128x128");
  // Both, either under a softcap, and wide heads run in the kernel of any.
  EXPECT_EQ(kernel(call + "d64/causal" + slopes + table), "fwd_e4m3_d64_biased_128x128");
  EXPECT_EQ(kernel(call + "d128/causal/softcap20" + slopes), "fwd_e4m3_d128_biased_128x128");
  EXPECT_EQ(kernel(call + "d192x128/causal" + slopes), "fwd_e4m3_d256_biased_128x64");
  // Ragged batches, which share no tiles, few queries, caches, and masks as lists.
  EXPECT_EQ(kernel("e4m3/b9/q20/k20/h2/d64/causal/random/packed" + slopes),
            "fwd_e4m3_d64_slopes_192x128");
  EXPECT_EQ(kernel("e4m3/b2/q1/k9000/h4x2/d128/causal" + slopes), "fwd_e4m3_d128_slopes_128x192");
  EXPECT_EQ(kernel("e4m3/b2/q1/k9000/h4x2/d128/causal/usedk/paged64" + slopes),
            "fwd_e4m3_d128_split_biased_128x128");
  EXPECT_EQ(kernel("e4m3/b2/q200/k9000/h128x2/d256/causal/usedk/paged16" + table),
            "fwd_e4m3_d256_paged_biased_128x64");
  EXPECT_EQ(kernel(call + "d128/full/mask:documents" + table),
            "fwd_e4m3_d128_lists_biased_128x128");
}

TEST(BiasedFp8, IsExplained) {
  const auto scores = [](const std::string& id) {
    const std::string lines = explained(problem_of(id));
    const size_t at = lines.find("scores: ");
    return at == std::string::npos ? "" : lines.substr(at, lines.find('\n', at) - at);
  };
  const std::string added = "scores: with what depends on their place, added tile by tile";
  for (const std::string dtype : {"e4m3", "bf16"}) {
    const std::string call = dtype + "/b2/q200/k300/h4x2/d128/causal";
    EXPECT_EQ(scores(call), "");
    for (const std::string terms :
         {"alibi_slopes=heads", "bias_table=hd", "softcap20/alibi_slopes=heads/bias_table=d"})
      EXPECT_EQ(scores(call + "/" + terms), added) << terms;
  }
}

// A key tile has one scale: where blocks of keys have their own it lies in one of them.
TEST(BiasedFp8, TilesOf192KeysAreForOtherScalesThanThoseOfBlocks) {
  const std::string call = "e4m3/b1/q8000/k8000/h8/d128/causal/alibi_slopes=heads";
  for (const std::string scales : {"", "/onescale", "/headscales"})
    EXPECT_EQ(kernel(call + scales), "fwd_e4m3_d128_slopes_128x192") << scales;
  EXPECT_EQ(kernel(call + "/blockscales"), "fwd_e4m3_d128_slopes_128x128");
}

TEST(BiasedFp8, TheTablesHaveCallsThatRun) {
  std::vector<cases::Case> list = cases::fp8_mask_case_table();
  const auto add = [&](const std::vector<cases::Case>& table) {
    list.insert(list.end(), table.begin(), table.end());
  };
  add(cases::cache_case_table(cases::Level::kFull, cases::dtypes_of(FLASH3_BACKEND_HOPPER)));
  for (const bool ragged : {false, true})
    add(cases::with_added_tensors(cases::fp8_case_table(cases::Level::kFull, ragged),
                                  FLASH3_BACKEND_HOPPER));
  int slopes = 0, tables = 0, computed = 0;
  for (const cases::Case& c : list) {
    ForwardProblem problem = problem_of(c);
    if (!is_biased(problem) || !(c.fp8 || problem.has_fp8_keys())) continue;
    if (c.fp8) problem = quantized_forward(problem).forward;
    PlannedSteps steps;
    const Status status = plan(problem, kDevice, &steps.workspace_bytes, &steps);
    ASSERT_TRUE(status.ok()) << to_id(c) << ": " << status.message();
    if (!problem.has_output()) continue;
    ASSERT_TRUE(steps.forward && !steps.decode) << to_id(c);
    EXPECT_NE(steps.forward->kernel->config.terms, BiasTerms::kNone) << to_id(c);
    slopes += problem.alibi_slopes.given;
    tables += problem.bias_table.given;
    computed += c.fp8;
  }
  EXPECT_GE(slopes, 100);
  EXPECT_GE(tables, 100);
  EXPECT_GE(computed, 3);
}

TEST(BiasedFp8, SaysWhatItDoesNotTake) {
  const auto refusal = [](const std::string& id) {
    ForwardProblem problem = problem_of(id);
    if (problem.quantizes) problem = quantized_forward(problem).forward;
    PlannedSteps steps;
    const Status status = plan(problem, kDevice, &steps.workspace_bytes, &steps);
    EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED) << id;
    return status.message();
  };
  const std::string sizes = "/b2/q200/k300/h4x2/d64/causal";
  for (const std::string& id : {"e4m3" + sizes + "/bias=qk", "bf16" + sizes + "/fp8/bias=hqk",
                                "e4m3" + sizes + "/bias=qk/alibi_slopes=heads"})
    EXPECT_EQ(refusal(id),
              "bias is given but k and v are FP8, or become it; the hopper backend takes it with "
              "float16 and bfloat16 keys only, and alibi_slopes and bias_table with any");
  EXPECT_EQ(refusal("bf16" + sizes + "/usedk/kv8/alibi_slopes=heads"),
            "alibi_slopes is given and q.dtype = bfloat16 but k and v are float8_e4m3; the hopper "
            "backend takes it where q, k and v are of one dtype");
  EXPECT_EQ(refusal("e4m3" + sizes + "/usedk/paged36/bias_table=d").substr(0, 43),
            "bias_table is given but pages have too few ");
  EXPECT_EQ(refusal("e4m3" + sizes + "/usedk/paged64/blockscales/alibi_slopes=heads"),
            "alibi_slopes is given but scales of blocks begin elsewhere than key tiles");
  EXPECT_EQ(refusal("e4m3" + sizes + "/softcap20/mask:dense/bias_table=d").substr(0, 37),
            "mask is given and softcap is given bu");
}

}  // namespace
}  // namespace flash3::cuda::sm90
