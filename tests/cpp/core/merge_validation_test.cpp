// SPDX-License-Identifier: Apache-2.0
// The rules of flash3_merge: what breaks each, and the exact sentence that the user reads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "flash3/flash3.hpp"
#include "flash3/plan.hpp"

namespace flash3::test {
namespace {

using M = flash3_merge_params;

// Three parts of two rows of four heads.
struct MergeCall {
  std::vector<float> parts = std::vector<float>(3 * 2 * 4 * 8, 0.5f), lses = std::vector<float>(24);
  std::vector<float> out = std::vector<float>(2 * 4 * 8, -1.f), lse = std::vector<float>(8, -1.f);
  std::vector<float> sink = std::vector<float>(4);

  Merge args() {
    return {.out_parts = tensor(parts.data(), FLASH3_FLOAT32, {3, 2, 4, 8}),
            .lse_parts = lse_tensor(lses.data(), 3, 4, 2),
            .out = packed_tensor(out.data(), FLASH3_FLOAT32, {2, 4, 8}),
            .lse = packed_lse_tensor(lse.data(), 4, 2),
            .sink = sink_tensor(sink.data(), FLASH3_FLOAT32, 4),
            .backend = FLASH3_BACKEND_CPU};
  }
};

std::vector<Rule<M>> merge_rules() {
  return {
      {"StructSize", [](M& p) { p.struct_size = 8; },
       "struct_size = 8 but flash3_merge_params takes " + std::to_string(sizeof(M)) +
           " bytes; set struct_size = sizeof(flash3_merge_params)"},
      {"NoParts", [](M& p) { p.out_parts = {}; },
       "out_parts is all zero; it must be a tensor [parts, rows, heads, head_dim_v]"},
      {"NoLses", [](M& p) { p.lse_parts = {}; },
       "lse_parts is all zero; it must be a tensor [parts, heads, rows]"},
      {"NoOut", [](M& p) { p.out = {}; },
       "out is all zero; it must be a tensor [rows, heads, head_dim_v]"},
      {"PartsDtype", [](M& p) { p.out_parts.dtype = FLASH3_FLOAT16; },
       "out_parts.dtype = 1 but it must be 3 (float32)"},
      {"LsesDtype", [](M& p) { p.lse_parts.dtype = FLASH3_BFLOAT16; },
       "lse_parts.dtype = 2 but it must be 3 (float32)"},
      {"LseDtype", [](M& p) { p.lse.dtype = FLASH3_FLOAT16; },
       "lse.dtype = 1 but it must be 3 (float32); an lse that is not wanted is all zero"},
      {"OutDtype", [](M& p) { p.out.dtype = FLASH3_INT32; },
       "out.dtype = 4 but it must be 1 (float16), 2 (bfloat16) or 3 (float32)"},
      {"OutNdim", [](M& p) { p.out.ndim = 4; },
       "out.ndim = 4 but it must be 3, [rows, heads, head_dim_v]"},
      {"Parts", [](M& p) { p.lse_parts.shape[0] = 2; },
       "lse_parts.shape[0] = 2 but out_parts.shape[0] = 3; out_parts and lse_parts must have the "
       "same number of parts"},
      {"Heads", [](M& p) { p.lse_parts.shape[1] = 2; },
       "lse_parts.shape[1] = 2 but out_parts.shape[2] = 4; out_parts and lse_parts must have the "
       "same heads"},
      {"Rows", [](M& p) { p.out.shape[0] = 1; },
       "out.shape[0] = 1 but out_parts.shape[1] = 2; out_parts and out must have the same rows"},
      {"HeadDim", [](M& p) { p.out.shape[2] = 16; },
       "out.shape[2] = 16 but out_parts.shape[3] = 8; out_parts and out must have the same "
       "head_dim_v"},
      {"HeadDimRange", [](M& p) { p.out.shape[2] = p.out_parts.shape[3] = 513; },
       "out_parts.shape[3] = 513 but head_dim_v must be from 1 to 512"},
      {"LseShape", [](M& p) { p.lse.shape[1] = 3; },
       "lse.shape[1] = 3 but out_parts.shape[1] = 2; out_parts and lse must have the same rows"},
      {"SinkHeads", [](M& p) { p.sink.shape[0] = 3; },
       "sink.shape[0] = 3 but out.shape[1] = 4; out and sink must have the same heads_q"},
      {"SinkDtype", [](M& p) { p.sink.dtype = FLASH3_BFLOAT16; },
       "sink.dtype = 2 but out.dtype = 3; a sink must be 3 (float32) or have the dtype of out, and "
       "one that is not wanted is all zero"},
      {"Overlap", [](M& p) { p.out.stride[0] = 0; },
       "out.stride[0] = 0 but it must be at least 1, the extent of the dimensions with smaller "
       "strides; the elements of an output must not overlap"},
      {"Stride", [](M& p) { p.out_parts.stride[3] = 2; },
       "out_parts.stride[3] = 2 but it must be 1; the last dimension of out_parts, [parts, rows, "
       "heads, head_dim_v], must be contiguous"},
      {"Threads", [](M& p) { p.num_threads = -1; },
       "num_threads = -1 but it must be at least 0 (0: one per core)"},
  };
}

class MergeRules : public testing::TestWithParam<Rule<M>> {};

TEST_P(MergeRules, IsRefused) {
  MergeCall call;
  M p = call.args().params();
  ASSERT_EQ(flash3_merge_supported(&p), FLASH3_OK) << flash3_last_error();
  GetParam().breaks(p);
  EXPECT_EQ(flash3_merge_supported(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_merge(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  for (const float x : call.out) ASSERT_EQ(x, -1.f);
}

INSTANTIATE_TEST_SUITE_P(Rules, MergeRules, testing::ValuesIn(merge_rules()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(MergeCalls, AnswerAndRun) {
  MergeCall call;
  const Merge args = call.args();
  EXPECT_TRUE(supported(args));
  EXPECT_EQ(workspace(args), 0u);
  EXPECT_NE(explain(args).find("problem: merge to float32, parts 3, rows 2, heads 4, head_dim_v 8, "
                               "with lse, with float32 sink\n"),
            std::string::npos)
      << explain(args);
  merge(args);
  // Three parts and the sink weigh the same.
  for (const float x : call.out) EXPECT_FLOAT_EQ(x, 0.375f);
  for (const float x : call.lse) EXPECT_FLOAT_EQ(x, std::log(4.f));

  MergeCall other;
  std::fill(other.parts.begin(), other.parts.end(), 1.f);
  const Plan plan(args);
  plan.run(other.args());
  for (const float x : other.out) EXPECT_FLOAT_EQ(x, 0.75f);
  Merge wrong = args;
  wrong.out.shape[0] = 1;
  EXPECT_EQ(plan.try_run(wrong).message(),
            "out.shape[0] = 1 but the plan was made for 2; only addresses, stream and workspace "
            "may change");
}

TEST(MergeCalls, OfNoRowsAreEmpty) {
  MergeCall call;
  M p = call.args().params();
  p.out_parts.shape[1] = p.lse_parts.shape[2] = p.out.shape[0] = p.lse.shape[1] = 0;
  EXPECT_EQ(flash3_merge(&p), FLASH3_OK) << flash3_last_error();
  for (const float x : call.out) ASSERT_EQ(x, -1.f);
}

}  // namespace
}  // namespace flash3::test
