// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for a KV cache, for appended tokens and for their rotary embedding: what
// breaks each, and the exact sentence that the user reads; and what a valid call becomes.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"

namespace flash3::test {
namespace {

using F = flash3_forward_params;

flash3_tensor index(int64_t size) {
  static constexpr int32_t kZeros[8] = {};
  return index_tensor(kZeros, size);
}

std::vector<Rule<F>> cache_rules() {
  return {
      // What goes together.
      {"TableOfPackedKeys", [](F& p) { p.cu_seqlens_k = index(3); },
       "page_table is given and cu_seqlens_k is given; packed keys are no cache"},
      {"LeftpadOfPackedKeys",
       [](F& p) {
         p.page_table = p.k_new = p.v_new = p.rotary_cos = p.rotary_sin = p.rotary_offsets = {};
         p.cu_seqlens_k = index(3);
       },
       "leftpad_k is given and cu_seqlens_k is given; packed keys are no cache"},
      {"AppendToPackedKeys",
       [](F& p) { p.page_table = p.leftpad_k = {}, p.cu_seqlens_k = index(3); },
       "k_new is given and cu_seqlens_k is given; packed keys are no cache"},
      {"TableAndBatchIdx", [](F& p) { p.cache_batch_idx = index(2); },
       "cache_batch_idx is given and page_table is given; a page table tells where the keys lie"},
      {"KNewAlone", [](F& p) { p.v_new = {}; },
       "k_new is given but v_new is not; keys are appended with their values, unless v is a part "
       "of k, but v.shape[3] = 16 and k.shape[3] = 8"},
      {"VNewAlone", [](F& p) { p.k_new = {}; },
       "v_new is given but k_new is not; values are appended with their keys"},
      {"AppendWithoutLengths", [](F& p) { p.seqused_k = {}; },
       "k_new is given but seqused_k is not; it tells how many keys the new ones follow"},
      {"CuOfNothing",
       [](F& p) {
         p.cu_seqlens_k_new = index(3);
         p.k_new = p.v_new = p.rotary_cos = p.rotary_sin = p.rotary_offsets = {};
       },
       "cu_seqlens_k_new is given but k_new is not; it tells the sequences of k_new apart"},
      {"RotaryOfNothing", [](F& p) { p.k_new = p.v_new = {}; },
       "rotary_cos is given but k_new is not; q and the new keys get the embedding together"},
      {"CosAlone", [](F& p) { p.rotary_sin = {}; },
       "rotary_cos is given but rotary_sin is not; an embedding needs both tables"},
      {"SinAlone", [](F& p) { p.rotary_cos = {}; },
       "rotary_sin is given but rotary_cos is not; an embedding needs both tables"},
      {"OffsetsOfNothing", [](F& p) { p.rotary_cos = p.rotary_sin = {}; },
       "rotary_offsets is given but rotary_cos is not; there are no positions without"},

      // Each by itself.
      {"TableDtype", [](F& p) { p.page_table.dtype = FLASH3_FLOAT32; },
       "page_table.dtype = 3 but it must be 4 (int32); page_table that is not given is all zero"},
      {"TableNdim", [](F& p) { p.page_table.ndim = 1; },
       "page_table.ndim = 1 but it must be 2, [batch, max_pages]"},
      {"TableStride", [](F& p) { p.page_table.stride[1] = 2; },
       "page_table.stride[1] = 2 but it must be 1; the last dimension of page_table, [batch, "
       "max_pages], must be contiguous"},
      {"LeftpadDtype", [](F& p) { p.leftpad_k.dtype = FLASH3_FLOAT16; },
       "leftpad_k.dtype = 1 but it must be 4 (int32); leftpad_k that is not given is all zero"},
      {"LeftpadStride", [](F& p) { p.leftpad_k.stride[0] = 2; },
       "leftpad_k.stride[0] = 2 but it must be 1; the last dimension of leftpad_k, [batch], must "
       "be contiguous"},
      {"OffsetsNdim", [](F& p) { p.rotary_offsets.ndim = 2; },
       "rotary_offsets.ndim = 2 but it must be 1, [batch]"},
      {"CuNewSize", [](F& p) { p.cu_seqlens_k_new = index(0); },
       "cu_seqlens_k_new.shape[0] = 0 but it must be at least 1, one more than there are "
       "sequences"},
      {"Interleaved", [](F& p) { p.rotary_interleaved = 2; },
       "rotary_interleaved = 2 but it must be 0 or 1"},
      {"Rotate", [](F& p) { p.rotate = 2; }, "rotate = 2 but it must be 0 or 1"},
      {"RotateWide",
       [](F& p) {
         p.q.shape[3] = p.k.shape[3] = p.k_new.shape[3] = 257;
         p.q.stride[2] = p.k.stride[2] = p.k_new.stride[2] = 257;
         for (flash3_tensor* t : {&p.q, &p.k, &p.k_new})
           t->stride[1] = t->shape[2] * 257, t->stride[0] = t->shape[1] * t->stride[1];
         p.rotate = 1;
       },
       "rotate = 1 but q.shape[3] = 257; a head dim that is rotated must be at most 256"},
      {"RotateValues",
       [](F& p) {
         p.v = p.k, p.v_new = {}, p.out = p.q, p.rotary_cos = p.rotary_sin = p.rotary_offsets = {};
         p.rotate = 1;
       },
       "rotate = 1 and k_new is given but v_new is not; v would be a part of the rows of k that "
       "are rotated"},
      {"Margin", [](F& p) { p.sm_margin = -1; }, "sm_margin = -1 but it must be at least 0"},
      {"MaxNegative", [](F& p) { p.max_seqlen_k = -7; },
       "max_seqlen_k = -7 but it must be at least 0 (0: not known)"},

      // Against q, k and v.
      {"KMissing", [](F& p) { p.k = {}; },
       "k is all zero; it must be a tensor [pages, page_size, heads_k, head_dim]"},
      {"VNdim", [](F& p) { p.v.ndim = 3; },
       "v.ndim = 3 but it must be 4, [pages, page_size, heads_k, head_dim_v]"},
      {"BatchOfTable", [](F& p) { p.page_table.shape[0] = 3; },
       "page_table.shape[0] = 3 but q.shape[0] = 2; q and page_table must have the same batch "
       "size"},
      {"PagesOfV", [](F& p) { p.v.shape[0] = 4; },
       "v.shape[0] = 4 but k.shape[0] = 5; k and v must have the same number of pages"},
      {"PageSizeOfV", [](F& p) { p.v.shape[1] = 8; },
       "v.shape[1] = 8 but k.shape[1] = 4; k and v must have the same seq_k"},
      {"NoPage", [](F& p) { p.k.shape[0] = p.v.shape[0] = 0; },
       "k.shape[0] = 0 but it must be at least 1, with page_table: the pages"},
      {"NoPageSize", [](F& p) { p.k.shape[1] = p.v.shape[1] = 0; },
       "k.shape[1] = 0 but it must be at least 1, with page_table: the page size"},
      {"TooManyKeys", [](F& p) { p.page_table.shape[1] = 1 << 29; },
       "page_table.shape[1] = 536870912 and k.shape[1] = 4; max_pages * page_size must be at most "
       "2147483647"},
      {"BatchOfLeftpad", [](F& p) { p.leftpad_k.shape[0] = 1; },
       "leftpad_k.shape[0] = 1 but q.shape[0] = 2; q and leftpad_k must have the same batch size"},
      {"BatchOfUsed", [](F& p) { p.seqused_k.shape[0] = 5; },
       "seqused_k.shape[0] = 5 but q.shape[0] = 2; q and seqused_k must have the same batch size"},

      // The new tokens.
      {"NewDtype", [](F& p) { p.k_new.dtype = FLASH3_BFLOAT16; },
       "k_new.dtype = bfloat16 but k.dtype = float32; k and k_new must have the same dtype"},
      {"NewNdim", [](F& p) { p.k_new.ndim = 3; },
       "k_new.ndim = 3 but it must be 4, [batch, seq_new, heads_k, head_dim]; packed sequences "
       "need "
       "cu_seqlens_k_new"},
      {"NewPackedNdim", [](F& p) { p.cu_seqlens_k_new = index(3); },
       "k_new.ndim = 4 but it must be 3, [total_new, heads_k, head_dim]"},
      {"NewHeads", [](F& p) { p.v_new.shape[2] = 1; },
       "v_new.shape[2] = 1 but v.shape[2] = 2; v and v_new must have the same heads_k"},
      {"NewHeadDim", [](F& p) { p.k_new.shape[3] = 7; },
       "k_new.shape[3] = 7 but k.shape[3] = 8; k and k_new must have the same head dim"},
      {"NewHeadDimV", [](F& p) { p.v_new.shape[3] = 8; },
       "v_new.shape[3] = 8 but v.shape[3] = 16; v and v_new must have the same head dim"},
      {"NewBatch", [](F& p) { p.k_new.shape[0] = 3; },
       "k_new.shape[0] = 3 but q.shape[0] = 2; q and k_new must have the same batch size"},
      {"NewSeq", [](F& p) { p.v_new.shape[1] = 2; },
       "v_new.shape[1] = 2 but k_new.shape[1] = 3; k_new and v_new must have the same seq_new"},
      {"NewStride", [](F& p) { p.k_new.stride[3] = 2; },
       "k_new.stride[3] = 2 but it must be 1; the last dimension of k_new, [batch, seq_new, "
       "heads_k, head_dim], must be contiguous"},
      {"CacheOverlaps", [](F& p) { p.v.stride[0] = 0; },
       "v.stride[0] = 0 but it must be at least 1, the extent of the dimensions with smaller "
       "strides; the elements of an output must not overlap"},
      {"RotaryDtype", [](F& p) { p.rotary_cos.dtype = FLASH3_FLOAT16; },
       "rotary_cos.dtype = float16 but q.dtype = float32; it must be float32 or the dtype of q and "
       "k_new"},
      {"RotaryShape", [](F& p) { p.rotary_sin.shape[0] = 19; },
       "rotary_sin.shape[0] = 19 but rotary_cos.shape[0] = 20; rotary_cos and rotary_sin must have "
       "the same shape"},
      {"RotaryDim", [](F& p) { p.rotary_cos.shape[1] = p.rotary_sin.shape[1] = 5; },
       "rotary_cos.shape[1] = 5 but q.shape[3] = 8; it must be from 1 to half of head_dim"},
      {"BatchOfOffsets", [](F& p) { p.rotary_offsets.shape[0] = 3; },
       "rotary_offsets.shape[0] = 3 but q.shape[0] = 2; q and rotary_offsets must have the same "
       "batch size"},

      // FP8.
      {"Fp8Compute", [](F& p) { p.compute = FLASH3_COMPUTE_FP8; },
       "page_table is given but compute = 1 (fp8); a KV cache is computed in the dtype that it "
       "has, and may be float8_e4m3",
       FLASH3_UNSUPPORTED},
      {"Fp8UnderFloat32", [](F& p) { p.k.dtype = p.v.dtype = FLASH3_FLOAT8_E4M3; },
       "q.dtype = float32 but k.dtype = float8_e4m3; FP8 keys and values need a q of float16, "
       "bfloat16 or float8_e4m3"},
  };
}

class CacheRules : public testing::TestWithParam<Rule<F>> {};

TEST_P(CacheRules, IsRefused) {
  CacheCall call;
  F p = call.args().params();
  ASSERT_NE(flash3_forward_supported(&p), FLASH3_INVALID_ARGUMENT) << flash3_last_error();
  const auto before = call.k;
  GetParam().breaks(p);
  EXPECT_EQ(flash3_forward_supported(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_forward(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  for (const float x : call.out) ASSERT_EQ(x, Call::kUntouched);
  EXPECT_EQ(call.k, before);
}

INSTANTIATE_TEST_SUITE_P(Rules, CacheRules, testing::ValuesIn(cache_rules()),
                         [](const auto& test) { return std::string(test.param.name); });

std::string elements_error(const std::function<void(F&)>& breaks) {
  CacheCall call;
  F p = call.elements().params();
  breaks(p);
  return flash3_forward_supported(&p) == FLASH3_OK ? "" : flash3_last_error();
}

TEST(CacheOfElements, Rules) {
  EXPECT_EQ(elements_error([](F&) {}), "");
  EXPECT_EQ(elements_error([](F& p) { p.cache_batch_idx.shape[0] = 3; }),
            "cache_batch_idx.shape[0] = 3 but q.shape[0] = 2; q and cache_batch_idx must have the "
            "same batch size");
  EXPECT_EQ(elements_error([](F& p) { p.v.shape[0] = 2; }),
            "v.shape[0] = 2 but k.shape[0] = 5; k and v must have the same number of elements");
  EXPECT_EQ(elements_error([](F& p) { p.k.shape[0] = p.v.shape[0] = 0; }),
            "k.shape[0] = 0 but it must be at least 1, with cache_batch_idx: the elements of the "
            "cache");
  EXPECT_EQ(elements_error([](F& p) { p.cache_batch_idx.dtype = FLASH3_BFLOAT16; }),
            "cache_batch_idx.dtype = 2 but it must be 4 (int32); cache_batch_idx that is not given "
            "is all zero");
  EXPECT_EQ(elements_error([](F& p) { p.cu_seqlens_k = index(3), p.leftpad_k = {}; }),
            "cache_batch_idx is given and cu_seqlens_k is given; packed keys are no cache");
  // Without pages a maximum still goes with packed sequences alone.
  EXPECT_EQ(elements_error([](F& p) { p.max_seqlen_k = 3; }),
            "max_seqlen_k = 3 but cu_seqlens_k is all zero; a maximum goes with packed sequences "
            "alone");
}

TEST(CachePointers, NullDataIsRefusedOnlyByALaunch) {
  const struct {
    const char* name;
    flash3_tensor Forward::*member;
  } all[] = {{"page_table", &Forward::page_table},
             {"leftpad_k", &Forward::leftpad_k},
             {"k_new", &Forward::k_new},
             {"v_new", &Forward::v_new},
             {"rotary_cos", &Forward::rotary_cos},
             {"rotary_sin", &Forward::rotary_sin},
             {"rotary_offsets", &Forward::rotary_offsets}};
  for (const auto& [name, member] : all) {
    CacheCall call;
    Forward args = call.args();
    (args.*member).data = nullptr;
    const F p = args.params();
    ForwardProblem problem;
    const Status question = make_forward_problem(&p, Pointers::kOptional, &problem);
    EXPECT_TRUE(question.ok()) << question.message();
    EXPECT_TRUE(problem.is_ragged() && problem.cache.given() && problem.append.given);
    EXPECT_EQ(make_forward_problem(&p, Pointers::kRequired, &problem).message(),
              std::string(name) + ".data is null but " + name +
                  " has elements; only a tensor with a size of 0 needs no memory");
  }
}

TEST(CacheProblem, IsTheCall) {
  CacheCall call;
  Forward args = call.args();
  args.sm_margin = 4;
  args.rotary_interleaved = true;
  args.page_table.stride[0] = 3;
  const ForwardProblem p = problem_of(args);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.seq_k, 12);
  EXPECT_EQ(p.k.batch, 5);
  EXPECT_EQ(p.k.seq, 4);
  EXPECT_EQ(p.v.stride_batch, 4 * 2 * 16);
  EXPECT_EQ(p.sequences_k.rows, 12);
  EXPECT_EQ(p.sm_margin, 4);
  EXPECT_TRUE(p.is_ragged());

  EXPECT_TRUE(p.cache.paged && p.cache.has_leftpad && !p.cache.has_batch_idx);
  EXPECT_EQ(p.cache.page_table, call.table.data());
  EXPECT_EQ(p.cache.leftpad, call.leftpad.data());
  EXPECT_EQ(p.cache.stride_table, 3);
  EXPECT_EQ(p.cache.max_pages, 3);
  EXPECT_EQ(p.cache.page_size, 4);
  EXPECT_EQ(p.cache.pages, 5);

  EXPECT_EQ(p.append.k.data, call.k_new.data());
  EXPECT_EQ(p.append.v.stride_seq, 32);
  EXPECT_EQ(p.append.sequences.rows, 3);
  EXPECT_EQ(p.append.rotary.dim, 6);
  EXPECT_EQ(p.append.rotary.positions, 20);
  EXPECT_TRUE(p.append.rotary.interleaved);
  EXPECT_EQ(p.append.rotary_offsets, call.offsets.data());
  EXPECT_EQ(p.query_position(7, 1), 8);  // causal
  EXPECT_TRUE(p.transforms_q() && !p.rotates);

  // Two of five cached keys are padding, and three are new: the first key's place is 2.
  const SeqInfo s = p.sequence(0);
  EXPECT_EQ(s.k.first, 2);
  EXPECT_EQ(s.k.length, 6);
  EXPECT_EQ(p.mask(s).row_shift, 4);
  const CacheRow row = cache_row(p.cache, 0, s.k.first + 5);
  EXPECT_EQ(row.element, 1);
  EXPECT_EQ(row.row, 3);
  EXPECT_EQ(p.sequence(1).k.length, 12);

  args.causal = false;
  EXPECT_EQ(problem_of(args).query_position(7, 1), 7);
  args.rotate = true, args.rotation_seed = 5;
  args.k_new = args.v_new = args.rotary_cos = args.rotary_sin = args.rotary_offsets = {};
  const ForwardProblem rotated = problem_of(args);
  EXPECT_TRUE(rotated.rotates && rotated.transforms_q());
  EXPECT_EQ(rotated.rotation_seed, 5u);
}

TEST(CacheProblem, OfPackedTokensAndQueries) {
  CacheCall call;
  Forward args = call.args();
  args.k_new = packed_tensor(call.k_new.data(), FLASH3_FLOAT32, {3, 2, 8});
  args.v_new = packed_tensor(call.v_new.data(), FLASH3_FLOAT32, {3, 2, 16});
  args.cu_seqlens_k_new = index_tensor(call.cu_new.data(), 3);
  const std::array<int32_t, 3> cu_q{0, 1, 4};
  args.q = packed_tensor(call.q.data(), FLASH3_FLOAT32, {4, 4, 8});
  args.out = packed_tensor(call.out.data(), FLASH3_FLOAT32, {4, 4, 16});
  args.cu_seqlens_q = index_tensor(cu_q.data(), 3);
  args.max_seqlen_k = 11;
  const ForwardProblem p = problem_of(args);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.seq_k, 11);
  EXPECT_EQ(p.append.k.stride_batch, 0);
  EXPECT_EQ(p.sequence(0).k.length, 4);
  EXPECT_EQ(p.sequence(1).k.length, 11);
  args.page_table.shape[0] = 1;
  const F wrong = args.params();
  ForwardProblem unused;
  EXPECT_EQ(make_forward_problem(&wrong, Pointers::kRequired, &unused).message(),
            "page_table.shape[0] = 1 but cu_seqlens_q.shape[0] - 1 = 2; cu_seqlens_q and "
            "page_table must have the same batch size");
}

// A cache that grows is written, though there may be no query.
TEST(CacheProblem, Emptiness) {
  CacheCall call;
  Forward args = call.args();
  args.q.shape[1] = args.out.shape[1] = 0;
  EXPECT_FALSE(problem_of(args).is_empty());
  args.k_new.shape[1] = args.v_new.shape[1] = 0;
  EXPECT_TRUE(problem_of(args).is_empty());
}

TEST(CacheExplain, TellsTheCall) {
  CacheCall call;
  EXPECT_NE(explain(call.args())
                .find("problem: float32, batch 2, seq_q 2, seq_k up to 12, heads_q 4, heads_k 2, "
                      "head_dim 8, head_dim_v 16, in pages of 4 (5 of them), padded on the left, "
                      "appending 3 keys, with rotary embedding of 6 dimensions, by halves\n"),
            std::string::npos)
      << explain(call.args());
  Forward rotated = call.args();
  rotated.rotate = true;
  for (const char* const line :
       {"by halves, with rotation\n",
        "first: the new keys and values go into the cache, and q with its embedding and rotation "
        "into the workspace"})
    EXPECT_NE(explain(rotated).find(line), std::string::npos) << line << "\n" << explain(rotated);
  rotated = call.elements();
  rotated.rotate = true;
  for (const char* const line :
       {"padded on the left, with rotation\n", "first: q with its rotation into the workspace"})
    EXPECT_NE(explain(rotated).find(line), std::string::npos) << line << "\n" << explain(rotated);
  EXPECT_NE(explain(call.elements()).find(", of a cache of 5, padded on the left\n"),
            std::string::npos)
      << explain(call.elements());
}

}  // namespace
}  // namespace flash3::test
