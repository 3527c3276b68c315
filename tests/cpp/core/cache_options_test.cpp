// SPDX-License-Identifier: Apache-2.0
// What the index tensors of a call on a KV cache hold: where pages, tokens and positions lie, and
// the sentence about the one that lies elsewhere.

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "flash3/flash3.hpp"

namespace flash3::test {
namespace {

template <class Bend>
std::string places_error(const Bend& bend) {
  CacheCall call;
  Forward args = call.args();
  bend(call, args);
  return lengths_message(args);
}

TEST(CachePlaces, OfPages) {
  using C = CacheCall;
  EXPECT_EQ(places_error([](C&, Forward&) {}), "");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[1] = 5; }),
            "page_table[0][1] = 5 but it must be from 0 to 4, the pages of k and v");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[3] = -1; }),
            "page_table[1][0] = -1 but it must be from 0 to 4, the pages of k and v");
  // Pages of padding alone are not looked at.
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[3] = -1, c.leftpad[1] = 4; }), "");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.leftpad[0] = 6; }),
            "leftpad_k[0] = 6 but it must be from 0 to 5, the keys of that sequence");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.leftpad[1] = -1; }),
            "leftpad_k[1] = -1 but it must be from 0 to 9, the keys of that sequence");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.used[1] = 13; }),
            "seqused_k[1] = 13 but it must be from 0 to 12, the rows of that sequence");
}

TEST(CachePlaces, OfNewTokens) {
  using C = CacheCall;
  EXPECT_EQ(places_error([](C& c, Forward&) { c.used[1] = 10; }),
            "seqused_k[1] = 10 and 3 keys of k_new are appended but sequence 1 can have at most 12 "
            "keys");
  EXPECT_EQ(places_error([](C&, Forward& f) { f.max_seqlen_k = 11; }),
            "seqused_k[1] = 9 and 3 keys of k_new are appended but sequence 1 can have at most 11 "
            "keys");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[1] = 2; }),
            "sequences 0 and 1 both append a key to k[2][1]; no two sequences may write one row");
  const auto packed = [](C& c, Forward& f) {
    f.k_new = packed_tensor(c.k_new.data(), FLASH3_FLOAT32, {3, 2, 8});
    f.v_new = packed_tensor(c.v_new.data(), FLASH3_FLOAT32, {3, 2, 16});
    f.cu_seqlens_k_new = index_tensor(c.cu_new.data(), 3);
  };
  EXPECT_EQ(places_error(packed), "");
  EXPECT_EQ(places_error([&](C& c, Forward& f) { packed(c, f), c.cu_new[2] = 4; }),
            "cu_seqlens_k_new[2] = 4 but it must be from 0 to 3, the rows of the packed tensors");
  EXPECT_EQ(places_error([&](C& c, Forward& f) { packed(c, f), c.cu_new[2] = 0; }),
            "cu_seqlens_k_new[2] = 0 but cu_seqlens_k_new[1] = 1; cu_seqlens_k_new must not "
            "decrease");
}

TEST(CachePlaces, OfPositions) {
  using C = CacheCall;
  EXPECT_EQ(places_error([](C& c, Forward&) { c.offsets = {0, 17}; }), "");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.offsets[1] = 18; }),
            "rotary_offsets[1] = 18 but rotary_cos.shape[0] = 20; the tables must have a position "
            "for each of the 3 tokens from there on");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.offsets[0] = -1; }),
            "rotary_offsets[0] = -1 but rotary_cos.shape[0] = 20; the tables must have a position "
            "for each of the 3 tokens from there on");
  EXPECT_EQ(places_error([](C&, Forward& f) {
              f.rotary_offsets = {};
              f.rotary_cos.shape[0] = f.rotary_sin.shape[0] = 11;
            }),
            "seqused_k[1] = 9 but rotary_cos.shape[0] = 11; the tables must have a position for "
            "each of the 3 tokens from there on");
  // Without a mask all queries are at the first new token's position.
  const auto one_new = [](C&, Forward& f) {
    f.rotary_offsets = {};
    f.k_new.shape[1] = f.v_new.shape[1] = 1;
    f.rotary_cos.shape[0] = f.rotary_sin.shape[0] = 10;
  };
  EXPECT_EQ(places_error([&](C& c, Forward& f) { one_new(c, f), f.causal = false; }), "");
  EXPECT_EQ(places_error(one_new),
            "seqused_k[1] = 9 but rotary_cos.shape[0] = 10; the tables must have a position for "
            "each of the 2 tokens from there on");
}

TEST(CachePlaces, OfElements) {
  CacheCall call;
  const Forward args = call.elements();
  EXPECT_EQ(lengths_message(args), "");
  call.batch_idx[1] = 5;
  EXPECT_EQ(lengths_message(args),
            "cache_batch_idx[1] = 5 but it must be from 0 to 4, the elements of k and v");
  call.batch_idx[1] = -1;
  EXPECT_EQ(lengths_message(args),
            "cache_batch_idx[1] = -1 but it must be from 0 to 4, the elements of k and v");
}

// The rules of flash3.h for a KV cache in FP8: its scales, the dtypes that go with it and what may
// be appended to it.

using F = flash3_forward_params;

// Addresses that are never read, each far from the others.
template <class T = void>
T* memory(uintptr_t tensor) {
  return reinterpret_cast<T*>(tensor << 40);
}

// Two sequences, 4 query heads on 2 KV heads, 40 pages of 200 rows, head_dim 8, head_dim_v 16.
F call(flash3_dtype q, flash3_dtype added) {
  Forward f;
  f.q = tensor(memory(1), q, {2, 3, 4, 8});
  f.k = tensor(memory(2), FLASH3_FLOAT8_E4M3, {40, 200, 2, 8});
  f.v = tensor(memory(3), FLASH3_FLOAT8_E4M3, {40, 200, 2, 16});
  f.out = tensor(memory(4), q == FLASH3_FLOAT8_E4M3 ? FLASH3_FLOAT16 : q, {2, 3, 4, 16});
  f.page_table = page_table_tensor(memory<int32_t>(5), 2, 9);
  f.seqused_k = index_tensor(memory<int32_t>(6), 2);
  f.k_new = tensor(memory(7), added, {2, 5, 2, 8});
  f.v_new = tensor(memory(8), added, {2, 5, 2, 16});
  f.k_scale = scale_tensor(memory<float>(9), 40, 2, 2);
  f.v_scale = scale_tensor(memory<float>(10), 2, 2);
  return f.params();
}
F call_of_bf16() { return call(FLASH3_BFLOAT16, FLASH3_BFLOAT16); }

Status make(const F& p, ForwardProblem* problem) {
  return make_forward_problem(&p, Pointers::kRequired, problem);
}
std::string error_of(F p, const std::function<void(F&)>& breaks) {
  breaks(p);
  ForwardProblem problem;
  return make(p, &problem).message();
}

TEST(Fp8Cache, TakesTheseDtypes) {
  const flash3_dtype fp8 = FLASH3_FLOAT8_E4M3, fp16 = FLASH3_FLOAT16, bf16 = FLASH3_BFLOAT16;
  for (const auto& [q, added] : {std::pair{fp16, fp16},
                                 {bf16, bf16},
                                 {fp16, fp8},
                                 {bf16, fp8},
                                 {fp8, fp8},
                                 {fp8, fp16},
                                 {fp8, bf16}}) {
    ForwardProblem problem;
    EXPECT_EQ(make(call(q, added), &problem).message(), "");
    EXPECT_EQ(problem.dtype, q);
    EXPECT_EQ(problem.kv_dtype, fp8);
    EXPECT_EQ(problem.append.dtype, added);
    EXPECT_TRUE(problem.has_fp8_keys() && problem.has_cache());
    EXPECT_EQ(error_of(call(q, added), [](F& p) { p.out.dtype = FLASH3_FLOAT32; }), "");
    EXPECT_EQ(error_of(call(q, added), [](F& p) { p.k_new = p.v_new = {}; }), "");
  }
}

TEST(Fp8Cache, RefusesOtherDtypes) {
  EXPECT_EQ(error_of(call(FLASH3_BFLOAT16, FLASH3_FLOAT16), [](F&) {}),
            "k_new.dtype = float16 but k.dtype = float8_e4m3 and q.dtype = bfloat16; it must be "
            "float8_e4m3 or the dtype of q");
  EXPECT_EQ(error_of(call(FLASH3_FLOAT8_E4M3, FLASH3_FLOAT32), [](F&) {}),
            "k_new.dtype = float32 but k.dtype = float8_e4m3 and q.dtype = float8_e4m3; it must be "
            "float8_e4m3 or 16-bit, float16 or bfloat16");
  EXPECT_EQ(error_of(call_of_bf16(), [](F& p) { p.v_new.dtype = FLASH3_FLOAT8_E4M3; }),
            "v_new.dtype = float8_e4m3 but k_new.dtype = bfloat16; k_new and v_new must have the "
            "same dtype");
  EXPECT_EQ(error_of(call_of_bf16(),
                     [](F& p) {
                       p.k.dtype = p.v.dtype = FLASH3_BFLOAT16, p.k_scale = p.v_scale = {},
                       p.k_new.dtype = p.v_new.dtype = FLASH3_FLOAT8_E4M3;
                     }),
            "k_new.dtype = 5 but it must be 1 (float16), 2 (bfloat16) or 3 (float32)");
}

TEST(Fp8Cache, AnEmbeddingNeeds16Bits) {
  const auto rotates = [](F& p) {
    p.rotary_cos = p.rotary_sin = rotary_tensor(memory(11), FLASH3_FLOAT32, 4, 2);
  };
  EXPECT_EQ(error_of(call_of_bf16(), rotates), "");
  EXPECT_EQ(error_of(call(FLASH3_FLOAT8_E4M3, FLASH3_BFLOAT16), rotates),
            "rotary_cos is given but q.dtype = float8_e4m3; a tensor with an embedding must have "
            "more than 8 bits");
  EXPECT_EQ(
      error_of(call(FLASH3_BFLOAT16, FLASH3_FLOAT8_E4M3), rotates),
      "rotary_cos is given but k_new.dtype = float8_e4m3; a tensor with an embedding must have "
      "more than 8 bits");
}

TEST(Fp8Cache, ARotationNeeds16Bits) {
  const auto rotates = [](F& p) { p.rotate = 1; };
  EXPECT_EQ(error_of(call_of_bf16(), rotates), "");
  EXPECT_EQ(error_of(call_of_bf16(), [](F& p) { p.rotate = 1, p.k_new = p.v_new = {}; }), "");
  EXPECT_EQ(error_of(call(FLASH3_FLOAT8_E4M3, FLASH3_BFLOAT16), rotates),
            "rotate = 1 but q.dtype = float8_e4m3; a rotated tensor must have more than 8 bits");
  EXPECT_EQ(
      error_of(call(FLASH3_BFLOAT16, FLASH3_FLOAT8_E4M3), rotates),
      "rotate = 1 but k_new.dtype = float8_e4m3; a rotated tensor must have more than 8 bits");
}

// By blocks: as many as k has pages or elements; by heads: as there are sequences.
TEST(Fp8Cache, ScalesOfPagesAndElements) {
  EXPECT_EQ(
      error_of(call_of_bf16(), [](F& p) { p.k_scale = scale_tensor(memory<float>(12), 2, 2, 2); }),
      "k_scale.shape[0] = 2 but k.shape[0] = 40; k and k_scale must have the same number of "
      "pages");
  EXPECT_EQ(error_of(call_of_bf16(),
                     [](F& p) { p.k_scale = scale_tensor(memory<float>(13), 40, 2, 15); }),
            "k_scale.shape[2] = 15 but k.shape[1] = 200; blocks must be 2, rows / 128, rounded up");
  EXPECT_EQ(
      error_of(call_of_bf16(), [](F& p) { p.v_scale = scale_tensor(memory<float>(14), 40, 2); }),
      "v_scale.shape[0] = 40 but q.shape[0] = 2; q and v_scale must have the same batch size");
  const auto elements = [](F& p) {
    p.page_table = {}, p.cache_batch_idx = index_tensor(memory<int32_t>(15), 2);
  };
  EXPECT_EQ(error_of(call_of_bf16(), elements), "");
  EXPECT_EQ(
      error_of(call_of_bf16(),
               [&](F& p) { elements(p), p.k_scale = scale_tensor(memory<float>(16), 2, 2, 2); }),
      "k_scale.shape[0] = 2 but k.shape[0] = 40; k and k_scale must have the same number of "
      "elements");
}

TEST(Fp8Cache, WhoseScaleARowHas) {
  float values[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  ScaleView blocks{values, ScaleKind::kBlock, 1, 6, 3, 1};
  EXPECT_EQ(cache_scale(blocks, 0, 1, {1, 260}), 6 + 3 + 2);  // of element 1, whose sequence is 0
  ScaleView heads{values, ScaleKind::kHead, 1, 2, 1, 0};
  EXPECT_EQ(cache_scale(heads, 3, 1, {1, 260}), 3 * 2 + 1);
  ScaleView one{values + 5, ScaleKind::kTensor, 1, 0, 0, 0};
  EXPECT_EQ(cache_scale(one, 3, 1, {1, 260}), 5);
  EXPECT_EQ(cache_scale({}, 3, 1, {1, 260}), 1);
}

// The rules of flash3.h for tree_mask: what breaks each, and the exact sentence that the user
// reads; and what a valid call becomes.

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
