// SPDX-License-Identifier: Apache-2.0
// Every rule of flash3.h: what breaks it, and the exact sentence that the user reads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"

namespace flash3::test {
namespace {

using P = flash3_forward_params;

std::vector<Rule<P>> rules() {
  std::vector<Rule<P>> all = shared_rules<P>("flash3_forward_params");
  const std::vector<Rule<P>> forward = {
      {"KDtypeDiffers", [](P& p) { p.k.dtype = FLASH3_FLOAT16; },
       "k.dtype = float16 but q.dtype = float32; q, k, v and out must have the same dtype"},
      {"VDtypeDiffers", [](P& p) { p.v.dtype = FLASH3_BFLOAT16; },
       "v.dtype = bfloat16 but q.dtype = float32; q, k, v and out must have the same dtype"},
      {"OutDtypeDiffers", [](P& p) { p.out.dtype = FLASH3_FLOAT16; },
       "out.dtype = float16 but q.dtype = float32; q, k, v and out must have the same dtype"},
      {"OutOfAnother16Bits",
       [](P& p) {
         p.q.dtype = p.k.dtype = p.v.dtype = FLASH3_BFLOAT16, p.out.dtype = FLASH3_FLOAT16;
       },
       "out.dtype = float16 but q.dtype = bfloat16; q, k, v and out must have the same dtype"},
      {"UnroundedOutOfMixedDtypes", [](P& p) { p.q.dtype = p.k.dtype = FLASH3_BFLOAT16; },
       "v.dtype = float32 but q.dtype = bfloat16; q, k and v must have the same dtype"},

      {"ElementCountOverflows",  // stride 0: the memory is small, the number of elements is not
       [](P& p) {
         for (flash3_tensor* t : {&p.q, &p.k, &p.v, &p.out}) {
           t->shape[0] = t->shape[1] = kMaxSize;
           t->shape[2] = 1;
           t->stride[0] = t->stride[1] = 0;
         }
       },
       "q takes more than 2^56 bytes; shape x stride = 2147483647 x 0 + 2147483647 x 0 "
       "+ 1 x 8 + 8 x 1"},
      {"MoreThanAnyMemory",  // and what follows from it would overflow
       [](P& p) {
         for (flash3_tensor* t : {&p.q, &p.k, &p.v, &p.out}) {
           t->shape[0] = kMaxSize, t->shape[1] = 1 << 22, t->shape[2] = 1;
           t->stride[0] = t->stride[1] = 0;
         }
       },
       "q takes more than 2^56 bytes; shape x stride = 2147483647 x 0 + 4194304 x 0 + 1 x 8 + 8 x "
       "1"},

      {"OutBroadcast", [](P& p) { p.out.stride[1] = 0; },
       "out.stride[1] = 0 but it must be at least 1, the extent of the dimensions with smaller "
       "strides; the elements of an output must not overlap"},
      {"OutOverlaps", [](P& p) { p.out.stride[2] = 15; },
       "out.stride[2] = 15 but it must be at least 16, the extent of the dimensions with smaller "
       "strides; the elements of an output must not overlap"},
      {"OutBatchesOverlap", [](P& p) { p.out.stride[0] = 191; },
       "out.stride[0] = 191 but it must be at least 192, the extent of the dimensions with smaller "
       "strides; the elements of an output must not overlap"},
      {"LseBroadcast", [](P& p) { p.lse.stride[0] = 0; },
       "lse.stride[0] = 0 but it must be at least 1, the extent of the dimensions with smaller "
       "strides; the elements of an output must not overlap"},
      {"LseOverlaps", [](P& p) { p.lse.stride[1] = 2; },
       "lse.stride[1] = 2 but it must be at least 3, the extent of the dimensions with smaller "
       "strides; the elements of an output must not overlap"},

      {"LseDtype", [](P& p) { p.lse.dtype = FLASH3_FLOAT16; },
       "lse.dtype = 1 but it must be 3 (float32); an lse that is not wanted is all zero"},
      {"LseHalfGiven",
       [](P& p) {
         p.lse = {};
         p.lse.shape[0] = 2;
       },
       "lse.dtype = 0 but it must be 3 (float32); an lse that is not wanted is all zero"},
  };
  all.insert(all.end(), forward.begin(), forward.end());
  return all;
}

class Validation : public testing::TestWithParam<Rule<P>> {};

// The same sentence from every function, and nothing written.
TEST_P(Validation, EveryFunctionRefuses) {
  Call call;
  auto p = call.params();
  GetParam().breaks(p);
  size_t bytes = 77, size = 77;
  char text[8] = "before";

  EXPECT_EQ(flash3_forward_supported(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_forward_workspace(&p, &bytes), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_forward_explain(&p, text, &size), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_forward(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);

  EXPECT_EQ(bytes, 77u);
  EXPECT_EQ(size, 77u);
  EXPECT_STREQ(text, "before");
  for (const float x : call.out) ASSERT_EQ(x, Call::kUntouched);
  for (const float x : call.lse) ASSERT_EQ(x, Call::kUntouched);
}

INSTANTIATE_TEST_SUITE_P(Rules, Validation, testing::ValuesIn(rules()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Pointers, NullDataIsRefusedOnlyByALaunch) {
  for (flash3_tensor Forward::*member :
       {&Forward::q, &Forward::k, &Forward::v, &Forward::out, &Forward::lse}) {
    Call call;
    (call.args.*member).data = nullptr;
    const auto p = call.params();
    ForwardProblem problem;
    EXPECT_TRUE(make_forward_problem(&p, Pointers::kOptional, &problem).ok());
    EXPECT_TRUE(problem.lse.wanted);
    const char* name = member == &Forward::q     ? "q"
                       : member == &Forward::k   ? "k"
                       : member == &Forward::v   ? "v"
                       : member == &Forward::out ? "out"
                                                 : "lse";
    EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
    EXPECT_EQ(flash3_last_error(), std::string(name) + ".data is null but " + name +
                                       " has elements; only a tensor with a size of 0 needs no "
                                       "memory");
  }
}

TEST(Pointers, DataMustBeAligned) {
  Call call;
  call.args.k.data = reinterpret_cast<void*>(uintptr_t{0x1002});
  auto p = call.params();
  EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(),
               "k.data = 0x1002 but it must be a multiple of 4, the size of a float32");
  EXPECT_EQ(flash3_forward_supported(&p), FLASH3_INVALID_ARGUMENT);

  call.args.lse.data = reinterpret_cast<void*>(uintptr_t{0x1001});
  for (flash3_tensor* t : {&call.args.q, &call.args.k, &call.args.v, &call.args.out}) {
    t->dtype = FLASH3_BFLOAT16;
    t->data = reinterpret_cast<void*>(uintptr_t{0x1002});
  }
  p = call.params();
  EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(),
               "lse.data = 0x1001 but it must be a multiple of 4, the size of a float32");

  call.args.v.data = reinterpret_cast<void*>(uintptr_t{0x1001});
  p = call.params();
  EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(),
               "v.data = 0x1001 but it must be a multiple of 2, the size of a bfloat16");
}

TEST(StructSize, NewerCallersMayLeaveTheirFieldsZero) {
  struct Newer {
    flash3_forward_params params;
    unsigned char more[16];
  };
  Call call;
  Newer newer{};
  newer.params = call.params();
  newer.params.struct_size = sizeof newer;
  ForwardProblem problem;
  EXPECT_TRUE(make_forward_problem(&newer.params, Pointers::kRequired, &problem).ok());

  newer.more[5] = 1;
  const Status status = make_forward_problem(&newer.params, Pointers::kRequired, &problem);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  EXPECT_EQ(
      status.message(),
      "struct_size = " + std::to_string(sizeof newer) + " but this library knows " +
          std::to_string(sizeof newer.params) + " bytes, and byte " +
          std::to_string(sizeof newer.params + 5) +
          " is set; the call was made for a newer flash3 than this one, " FLASH3_VERSION_STRING);
}

// What lies after the caller's struct is not read.
TEST(StructSize, OlderCallersHaveNoneOfTheNewerFields) {
  Call call;
  auto p = call.params();
  p.struct_size = offsetof(P, cu_seqlens_q);
  std::memset(reinterpret_cast<unsigned char*>(&p) + p.struct_size, 0xAB, sizeof p - p.struct_size);
  ForwardProblem problem;
  const Status status = make_forward_problem(&p, Pointers::kRequired, &problem);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_FALSE(problem.is_ragged());
  EXPECT_FALSE(problem.sink.given);
  EXPECT_EQ(problem.softcap, 0.f);
  EXPECT_EQ(problem.mask_rule.chunk, 0);
}

// ---- what is allowed ----

void expect_valid(const Forward& args) {
  const auto p = args.params();
  ForwardProblem problem;
  const Status status = make_forward_problem(&p, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
}

Forward question(const Sizes& s) {
  Forward f;
  f.q = tensor(nullptr, FLASH3_BFLOAT16, {s.batch, s.seq_q, s.heads_q, s.head_dim});
  f.k = tensor(nullptr, FLASH3_BFLOAT16, {s.batch, s.seq_k, s.heads_k, s.head_dim});
  f.v = tensor(nullptr, FLASH3_BFLOAT16, {s.batch, s.seq_k, s.heads_k, s.head_dim_v});
  f.out = tensor(nullptr, FLASH3_BFLOAT16, {s.batch, s.seq_q, s.heads_q, s.head_dim_v});
  f.lse = lse_tensor(nullptr, s.batch, s.heads_q, s.seq_q);
  return f;
}

TEST(Allowed, Limits) {
  expect_valid(question({1, kMaxSize, kMaxSize, 1, 1, 1, 256}));
  expect_valid(question({1, 1, 1, kMaxSize, 1, 256, 1}));
  expect_valid(question({kMaxSize, 1, 1, 1, 1, 64, 64}));
  expect_valid(question({4, 1 << 20, 1 << 20, 16, 16, 256, 256}));  // 2^34 elements
}

TEST(Allowed, Empty) {
  expect_valid(question({0, 3, 5, 4, 2, 8, 8}));
  expect_valid(question({2, 0, 5, 4, 2, 8, 8}));
  expect_valid(question({2, 3, 0, 4, 2, 8, 8}));
  expect_valid(question({2, 3, 5, 0, 2, 8, 8}));
  expect_valid(question({2, 3, 5, 0, 0, 8, 8}));
}

TEST(Allowed, HeadsFirstAndPaddedAndBroadcastStrides) {
  Forward f = question({2, 3, 5, 4, 2, 8, 8});
  f.out = heads_first(tensor(nullptr, FLASH3_BFLOAT16, {2, 4, 3, 8}));
  f.q = heads_first(tensor(nullptr, FLASH3_BFLOAT16, {2, 4, 3, 8}));
  f.k.stride[0] = 0;                         // one K for all of the batch
  f.v.stride[0] = f.v.stride[1] = 0;         // one value row
  f.lse.stride[0] = 3, f.lse.stride[1] = 6;  // [heads, batch, seq] memory
  expect_valid(f);
  f.out.stride[0] = 100, f.out.stride[2] = 25;  // gaps
  expect_valid(f);
}

TEST(Allowed, StridesOfSmallDimensionsAndUnusedSlotsAreIgnored) {
  Forward f = question({1, 1, 5, 4, 4, 1, 1});
  for (flash3_tensor* t : {&f.q, &f.k, &f.v, &f.out}) t->stride[0] = -7, t->stride[3] = 1000;
  f.q.stride[1] = f.out.stride[1] = kHuge;
  f.lse.shape[3] = -1, f.lse.stride[3] = -1;
  f.lse.stride[0] = 0, f.lse.stride[2] = 9;
  const auto p = f.params();
  ForwardProblem problem;
  ASSERT_TRUE(make_forward_problem(&p, Pointers::kOptional, &problem).ok());
  EXPECT_EQ(problem.q.stride_batch, 0);
  EXPECT_EQ(problem.q.stride_seq, 0);
  EXPECT_EQ(problem.out.stride_seq, 0);
  EXPECT_EQ(problem.k.stride_seq, 4);
}

TEST(Allowed, NoMemoryWhereThereAreNoElements) {
  Call call({2, 3, 0, 4, 2, 8, 16});
  call.args.k.data = call.args.v.data = nullptr;
  const auto p = call.params();
  ForwardProblem problem;
  EXPECT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
}

// ---- what the problem holds ----

TEST(Problem, IsTheCall) {
  Call call;
  call.args.backend = FLASH3_BACKEND_CPU;
  call.args.num_threads = 3;
  call.args.softmax_scale = 0.25f;
  call.args.stream = &call;
  call.args.workspace = call.out.data();
  call.args.workspace_size = 12;
  const auto p = call.params();
  ForwardProblem problem;
  ASSERT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
  EXPECT_EQ(problem.dtype, FLASH3_FLOAT32);
  EXPECT_EQ(problem.batch, 2);
  EXPECT_EQ(problem.seq_q, 3);
  EXPECT_EQ(problem.seq_k, 5);
  EXPECT_EQ(problem.heads_q, 4);
  EXPECT_EQ(problem.heads_k, 2);
  EXPECT_EQ(problem.queries_per_kv_head(), 2);
  EXPECT_EQ(problem.head_dim, 8);
  EXPECT_EQ(problem.head_dim_v, 16);
  EXPECT_EQ(problem.v.data, p.v.data);
  EXPECT_EQ(problem.v.stride_batch, 160);
  EXPECT_EQ(problem.v.stride_seq, 32);
  EXPECT_EQ(problem.v.stride_head, 16);
  EXPECT_EQ(problem.v.dim, 16);
  EXPECT_EQ(problem.lse.data, call.lse.data());
  EXPECT_EQ(problem.lse.stride_batch, 12);
  EXPECT_EQ(problem.lse.stride_head, 3);
  EXPECT_EQ(problem.softmax_scale, 0.25f);
  EXPECT_EQ(problem.backend, FLASH3_BACKEND_CPU);
  EXPECT_EQ(problem.num_threads, 3);
  EXPECT_EQ(problem.stream, &call);
  EXPECT_EQ(problem.workspace, call.out.data());
  EXPECT_EQ(problem.workspace_size, 12u);
  EXPECT_FALSE(problem.is_empty());
}

TEST(Problem, DefaultScaleAndNoLse) {
  Call call({}, /*with_lse=*/false);
  const auto p = call.params();
  ForwardProblem problem;
  ASSERT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
  EXPECT_FLOAT_EQ(problem.softmax_scale, 1.f / std::sqrt(8.f));
  EXPECT_FALSE(problem.lse.wanted);
}

TEST(Problem, Bands) {
  // seq_q = 3, seq_k = 5: i' = i + 2
  struct Case {
    bool causal, window;
    int64_t left, right;
    Index lo, hi;
  };
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  constexpr Index kFar = Band::kUnbounded;
  for (const Case& c : std::vector<Case>{
           {false, false, 1, 1, -kFar, kFar},        // window = 0: the two bounds are ignored
           {true, false, 1, 1, -kFar, 2},            // causal
           {false, true, 1, 3, 1, 5},                // window
           {false, true, -1, 3, -kFar, 5},           // unbounded on the left
           {false, true, 1, -1, 1, kFar},            // and on the right
           {false, true, kLowest, -9, -kFar, kFar},  // and on both sides
           {false, true, kHuge, kHuge, -kFar, kFar},
           {true, true, 1, -1, 1, 2},  // causal is the narrower bound
           {true, true, 1, 3, 1, 2},
           {true, true, 0, 0, 2, 2},
       }) {
    Call call;
    auto p = call.params();
    p.causal = c.causal, p.window = c.window, p.window_left = c.left, p.window_right = c.right;
    ForwardProblem problem;
    ASSERT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
    EXPECT_EQ(problem.band().lo, c.lo);
    EXPECT_EQ(problem.band().hi, c.hi);
  }
}

TEST(Problem, IsLeftAloneByAnError) {
  Call call;
  auto p = call.params();
  p.num_threads = -1;
  ForwardProblem problem;
  problem.seq_q = 4242;
  EXPECT_FALSE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
  EXPECT_EQ(problem.seq_q, 4242);
}

}  // namespace
}  // namespace flash3::test
