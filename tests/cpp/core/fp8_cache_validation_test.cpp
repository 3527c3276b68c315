// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for a KV cache in FP8: its scales, the dtypes that go with it and what may
// be appended to it.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/problem.hpp"
#include "flash3/flash3.hpp"
#include "rules.hpp"

namespace flash3::test {
namespace {

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
            "rotary_cos is given but q.dtype = float8_e4m3; what gets the embedding must be of "
            "more than 8 bits");
  EXPECT_EQ(error_of(call(FLASH3_BFLOAT16, FLASH3_FLOAT8_E4M3), rotates),
            "rotary_cos is given but k_new.dtype = float8_e4m3; what gets the embedding must be of "
            "more than 8 bits");
}

TEST(Fp8Cache, ARotationNeeds16Bits) {
  const auto rotates = [](F& p) { p.rotate = 1; };
  EXPECT_EQ(error_of(call_of_bf16(), rotates), "");
  EXPECT_EQ(error_of(call_of_bf16(), [](F& p) { p.rotate = 1, p.k_new = p.v_new = {}; }), "");
  EXPECT_EQ(error_of(call(FLASH3_FLOAT8_E4M3, FLASH3_BFLOAT16), rotates),
            "rotate = 1 but q.dtype = float8_e4m3; what is rotated must be of more than 8 bits");
  EXPECT_EQ(
      error_of(call(FLASH3_BFLOAT16, FLASH3_FLOAT8_E4M3), rotates),
      "rotate = 1 but k_new.dtype = float8_e4m3; what is rotated must be of more than 8 bits");
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

}  // namespace
}  // namespace flash3::test
