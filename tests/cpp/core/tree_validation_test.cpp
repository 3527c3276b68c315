// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for tree_mask: what breaks each, and the exact sentence that the user
// reads; and what a valid call becomes.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "rules.hpp"

namespace flash3::test {
namespace {

using F = flash3_forward_params;

constexpr uint64_t kWords[256] = {};

// Two sequences of two drafts each, which the call appends.
struct TreeCall : CacheCall {
  Forward args() {
    Forward f = CacheCall::args();
    f.rotary_cos = f.rotary_sin = f.rotary_offsets = {};
    f.causal = false;
    f.tree_mask = tree_mask_tensor(kWords, 2, 2);
    return f;
  }
  Forward packed() {
    Forward f = args();
    f.q = packed_tensor(q.data(), FLASH3_FLOAT32, {4, 4, 8});
    f.out = packed_tensor(out.data(), FLASH3_FLOAT32, {4, 4, 16});
    f.cu_seqlens_q = index_tensor(cu_new.data(), 3);
    f.max_seqlen_q = 2;
    f.tree_mask = packed_tree_mask_tensor(kWords, 4);
    return f;
  }
};

std::vector<Rule<F>> tree_rules() {
  return {
      {"Dtype", [](F& p) { p.tree_mask.dtype = FLASH3_INT32; },
       "tree_mask.dtype = 4 but it must be 6 (int64); tree_mask that is not given is all zero"},
      {"Ndim", [](F& p) { p.tree_mask.ndim = 1; },
       "tree_mask.ndim = 1 but it must be 2, [batch, seq_q]"},
      {"Batch", [](F& p) { p.tree_mask.shape[0] = 3; },
       "tree_mask.shape[0] = 3 but q.shape[0] = 2; q and tree_mask must have the same batch size"},
      {"Queries", [](F& p) { p.tree_mask.shape[1] = 3; },
       "tree_mask.shape[1] = 3 but q.shape[1] = 2; q and tree_mask must have the same seq_q"},
      {"LastStride", [](F& p) { p.tree_mask.stride[1] = 2; },
       "tree_mask.stride[1] = 2 but it must be 1; the last dimension of tree_mask, [batch, seq_q], "
       "must be contiguous"},
      {"NullData", [](F& p) { p.tree_mask.data = nullptr; },
       "tree_mask.data is null but tree_mask has elements; only a tensor with a size of 0 needs no "
       "memory"},
      {"TooManyDrafts",
       [](F& p) {
         p.q.shape[1] = p.out.shape[1] = p.tree_mask.shape[1] = 65;
         p.out.stride[0] = p.tree_mask.stride[0] = 10000;
       },
       "q.shape[1] = 65 but it must be at most 64 with tree_mask, which has a bit for each query "
       "of a sequence"},
      {"Causal", [](F& p) { p.causal = 1; },
       "tree_mask is given and causal = 1; tree_mask is the mask of the call"},
      {"Window", [](F& p) { p.window = 1; },
       "tree_mask is given and window = 1; tree_mask is the mask of the call"},
      {"Chunk", [](F& p) { p.chunk = 8; },
       "tree_mask is given and chunk = 8; tree_mask is the mask of the call"},
      {"Rotary",
       [](F& p) {
         static float table[60] = {};
         p.rotary_cos = p.rotary_sin = rotary_tensor(table, FLASH3_FLOAT32, 20, 3);
       },
       "tree_mask is given and rotary_cos is given; drafts of one depth have one position, which "
       "the call does not know: embed q and k_new before it"},
      {"ComputeFp8",
       [](F& p) {
         p.page_table = p.leftpad_k = p.k_new = p.v_new = {};
         p.k.shape[0] = p.v.shape[0] = 2;
         p.compute = FLASH3_COMPUTE_FP8;
       },
       "tree_mask is given but compute = 1 (fp8); drafts are verified in the dtype of q, k and v",
       FLASH3_UNSUPPORTED},
  };
}

class TreeRules : public testing::TestWithParam<Rule<F>> {};

TEST_P(TreeRules, SaysWhatIsWrong) {
  TreeCall call;
  F params = call.args().params();
  EXPECT_EQ(flash3_forward_supported(&params), FLASH3_OK) << flash3_last_error();
  GetParam().breaks(params);
  EXPECT_EQ(flash3_forward(&params), GetParam().status);
  EXPECT_EQ(std::string(flash3_last_error()), GetParam().message);
  for (const float x : call.out) ASSERT_EQ(x, Call::kUntouched);
}

INSTANTIATE_TEST_SUITE_P(Core, TreeRules, testing::ValuesIn(tree_rules()),
                         [](const auto& rule) { return std::string(rule.param.name); });

std::string packed_error(void (*change)(Forward&)) {
  TreeCall call;
  Forward args = call.packed();
  change(args);
  return supported(args).message();
}

TEST(TreeMask, OfPackedQueriesNeedsTheMost) {
  EXPECT_EQ(packed_error([](Forward&) {}), "");
  EXPECT_EQ(packed_error([](Forward& f) { f.max_seqlen_q = 64; }), "");
  for (const auto& [most, change] : {std::pair{"0", +[](Forward& f) { f.max_seqlen_q = 0; }},
                                     {"65", +[](Forward& f) { f.max_seqlen_q = 65; }}})
    EXPECT_EQ(packed_error(change), std::string("max_seqlen_q = ") + most +
                                        " but it must be from 1 to 64 with tree_mask, which has a "
                                        "bit for each query of a sequence");
  EXPECT_EQ(packed_error([](Forward& f) { f.tree_mask = packed_tree_mask_tensor(kWords, 5); }),
            "tree_mask.shape[0] = 5 but q.shape[0] = 4; q and tree_mask must have the same "
            "total_q");
  EXPECT_EQ(packed_error([](Forward& f) { f.tree_mask = tree_mask_tensor(kWords, 2, 2); }),
            "tree_mask.ndim = 2 but it must be 1, [total_q]");
}

TEST(TreeMask, BecomesWordsOfEachSequence) {
  TreeCall call;
  ForwardProblem problem;
  F params = call.args().params();
  params.tree_mask.stride[0] = 100;
  ASSERT_TRUE(make_forward_problem(&params, Pointers::kRequired, &problem).ok());
  EXPECT_TRUE(problem.tree.given);
  EXPECT_EQ(problem.tree.of(1, {0, 2, 2}), kWords + 100);
  params = call.packed().params();
  ASSERT_TRUE(make_forward_problem(&params, Pointers::kRequired, &problem).ok());
  EXPECT_EQ(problem.tree.of(1, {3, 1, 1}), kWords + 3);
  params.tree_mask = {};
  ASSERT_TRUE(make_forward_problem(&params, Pointers::kRequired, &problem).ok());
  EXPECT_FALSE(problem.tree.given);
  EXPECT_EQ(problem.tree.of(1, {3, 1, 1}), nullptr);
}

TEST(TreeMask, IsExplained) {
  TreeCall call;
  EXPECT_NE(explain(call.args()).find("tree_mask says"), std::string::npos);
}

}  // namespace
}  // namespace flash3::test
