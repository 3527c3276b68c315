// SPDX-License-Identifier: Apache-2.0
// Every rule of flash3.h for the backward: what breaks it, and the exact sentence that the user
// reads; and what a valid call becomes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"

namespace flash3::test {
namespace {

using P = flash3_backward_params;

std::vector<flash3_tensor*> tensors(P& p) {
  return {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv};
}

std::vector<Rule<P>> rules() {
  std::vector<Rule<P>> all = shared_rules<P>("flash3_backward_params");
  const std::string one_dtype = "; q, k, v, out, dout, dq, dk and dv must have the same dtype";
  const std::string overlap =
      ", the extent of the dimensions with smaller strides; the elements of an output must not "
      "overlap";
  const std::vector<Rule<P>> backward = {
      {"DoutMissing", [](P& p) { p.dout = {}; },
       "dout is all zero; it must be a tensor [batch, seq_q, heads_q, head_dim_v]"},
      {"DqMissing", [](P& p) { p.dq = {}; },
       "dq is all zero; it must be a tensor [batch, seq_q, heads_q, head_dim]"},
      {"DkMissing", [](P& p) { p.dk = {}; },
       "dk is all zero; it must be a tensor [batch, seq_k, heads_k, head_dim]"},
      {"DvMissing", [](P& p) { p.dv = {}; },
       "dv is all zero; it must be a tensor [batch, seq_k, heads_k, head_dim_v]"},
      {"LseMissing", [](P& p) { p.lse = {}; },
       "lse is all zero; the backward needs the lse, [batch, heads_q, seq_q], that the forward has "
       "written"},

      {"KDtypeDiffers", [](P& p) { p.k.dtype = FLASH3_FLOAT16; },
       "k.dtype = float16 but q.dtype = float32" + one_dtype},
      {"OutDtypeDiffers", [](P& p) { p.out.dtype = FLASH3_FLOAT16; },
       "out.dtype = float16 but q.dtype = float32" + one_dtype},
      {"DoutDtypeDiffers", [](P& p) { p.dout.dtype = FLASH3_BFLOAT16; },
       "dout.dtype = bfloat16 but q.dtype = float32" + one_dtype},
      {"DqDtypeDiffers", [](P& p) { p.dq.dtype = FLASH3_FLOAT16; },
       "dq.dtype = float16 but q.dtype = float32" + one_dtype},
      {"DvDtypeDiffers", [](P& p) { p.dv.dtype = FLASH3_FLOAT16; },
       "dv.dtype = float16 but q.dtype = float32" + one_dtype},
      {"UnroundedGradientsDiffer",
       [](P& p) {
         for (flash3_tensor* t : tensors(p)) t->dtype = FLASH3_BFLOAT16;
         p.dq.dtype = p.dk.dtype = FLASH3_FLOAT32;
       },
       "dv.dtype = bfloat16 but dq.dtype = float32; dq, dk and dv must have the same dtype"},
      {"UnroundedGradientOfOne",
       [](P& p) {
         for (flash3_tensor* t : tensors(p)) t->dtype = FLASH3_FLOAT16;
         p.dk.dtype = FLASH3_FLOAT32;
       },
       "dk.dtype = float32 but q.dtype = float16" + one_dtype},
      {"UnroundedGradientsOfMixedDtypes",
       [](P& p) {
         for (flash3_tensor* t : tensors(p)) t->dtype = FLASH3_FLOAT16;
         p.dq.dtype = p.dk.dtype = p.dv.dtype = p.dout.dtype = FLASH3_FLOAT32;
       },
       "dout.dtype = float32 but q.dtype = float16; q, k, v, out and dout must have the same "
       "dtype"},
      {"LseDtype", [](P& p) { p.lse.dtype = FLASH3_FLOAT16; },
       "lse.dtype = 1 but it must be 3 (float32)"},
      {"DlseDtype", [](P& p) { p.dlse.dtype = FLASH3_BFLOAT16; },
       "dlse.dtype = 2 but it must be 3 (float32); a dlse that is not given is all zero"},
      {"DlseHalfGiven",
       [](P& p) {
         p.dlse = {};
         p.dlse.stride[2] = 1;
       },
       "dlse.dtype = 0 but it must be 3 (float32); a dlse that is not given is all zero"},

      {"DkNdim", [](P& p) { p.dk.ndim = 3; },
       "dk.ndim = 3 but it must be 4, [batch, seq_k, heads_k, head_dim]; packed sequences need "
       "cu_seqlens_k"},
      {"DlseNdim", [](P& p) { p.dlse.ndim = 4; },
       "dlse.ndim = 4 but it must be 3, [batch, heads_q, seq_q]"},
      {"NegativeDvSize", [](P& p) { p.dv.shape[0] = -1; },
       "dv.shape[0] = -1 but a size must be from 0 to 2147483647"},

      {"BatchDout", [](P& p) { p.dout.shape[0] = 7; },
       "dout.shape[0] = 7 but out.shape[0] = 2; out and dout must have the same shape"},
      {"HeadDimDout", [](P& p) { p.dout.shape[3] = 8; },
       "dout.shape[3] = 8 but out.shape[3] = 16; out and dout must have the same shape"},
      {"SeqDq", [](P& p) { p.dq.shape[1] = 7; },
       "dq.shape[1] = 7 but q.shape[1] = 3; q and dq must have the same shape"},
      {"HeadsDk",  // those of k, also where query heads share them
       [](P& p) { p.dk.shape[2] = 4; },
       "dk.shape[2] = 4 but k.shape[2] = 2; k and dk must have the same shape"},
      {"HeadDimDv", [](P& p) { p.dv.shape[3] = 8; },
       "dv.shape[3] = 8 but v.shape[3] = 16; v and dv must have the same shape"},
      {"BatchDlse", [](P& p) { p.dlse.shape[0] = 7; },
       "dlse.shape[0] = 7 but q.shape[0] = 2; q and dlse must have the same batch size"},
      {"HeadsDlse", [](P& p) { p.dlse.shape[1] = 7; },
       "dlse.shape[1] = 7 but q.shape[2] = 4; q and dlse must have the same heads_q"},
      {"SeqDlse", [](P& p) { p.dlse.shape[2] = 7; },
       "dlse.shape[2] = 7 but q.shape[1] = 3; q and dlse must have the same seq_q"},

      {"NegativeStrideDout", [](P& p) { p.dout.stride[1] = -32; },
       "dout.stride[1] = -32 but a stride must be at least 0"},
      {"LastStrideDq", [](P& p) { p.dq.stride[3] = 2; },
       "dq.stride[3] = 2 but it must be 1; the last dimension of dq, [batch, seq_q, heads_q, "
       "head_dim], must be contiguous"},
      {"LastStrideDlse", [](P& p) { p.dlse.stride[2] = 0; },
       "dlse.stride[2] = 0 but it must be 1; the last dimension of dlse, [batch, heads_q, seq_q], "
       "must be contiguous"},
      {"DlseOverflows", [](P& p) { p.dlse.stride[0] = kHuge; },
       "dlse takes more than 2^56 bytes; shape x stride = 2 x 9223372036854775807 + 4 x "
       "3 + 3 x 1"},
      {"ElementCountOverflows",  // stride 0: the memory is small, the number of elements is not
       [](P& p) {
         for (flash3_tensor* t : tensors(p)) {
           t->shape[0] = t->shape[1] = kMaxSize;
           t->shape[2] = 1;
           t->stride[0] = t->stride[1] = 0;
         }
       },
       "q takes more than 2^56 bytes; shape x stride = 2147483647 x 0 + 2147483647 x 0 "
       "+ 1 x 8 + 8 x 1"},

      {"DqBroadcast", [](P& p) { p.dq.stride[1] = 0; },
       "dq.stride[1] = 0 but it must be at least 1" + overlap},
      {"DkOverlaps", [](P& p) { p.dk.stride[2] = 7; },
       "dk.stride[2] = 7 but it must be at least 8" + overlap},
      {"DvBatchesOverlap", [](P& p) { p.dv.stride[0] = 159; },
       "dv.stride[0] = 159 but it must be at least 160" + overlap},

      {"Deterministic", [](P& p) { p.deterministic = 2; },
       "deterministic = 2 but it must be 0 or 1"},
  };
  all.insert(all.end(), backward.begin(), backward.end());
  return all;
}

class BackwardValidation : public testing::TestWithParam<Rule<P>> {};

// The same sentence from every function, and nothing written.
TEST_P(BackwardValidation, EveryFunctionRefuses) {
  BackwardCall call;
  auto p = call.params();
  GetParam().breaks(p);
  size_t bytes = 77, size = 77;
  char text[8] = "before";

  EXPECT_EQ(flash3_backward_supported(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_backward_workspace(&p, &bytes), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_backward_explain(&p, text, &size), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_backward(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);

  EXPECT_EQ(bytes, 77u);
  EXPECT_EQ(size, 77u);
  EXPECT_STREQ(text, "before");
  for (const auto* gradient : {&call.dq, &call.dk, &call.dv})
    for (const float x : *gradient) ASSERT_EQ(x, Call::kUntouched);
}

INSTANTIATE_TEST_SUITE_P(Rules, BackwardValidation, testing::ValuesIn(rules()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(BackwardPointers, NullDataIsRefusedOnlyByALaunch) {
  const struct {
    const char* name;
    flash3_tensor Backward::*member;
  } all[] = {{"q", &Backward::q},      {"k", &Backward::k},       {"v", &Backward::v},
             {"out", &Backward::out},  {"dout", &Backward::dout}, {"dq", &Backward::dq},
             {"dk", &Backward::dk},    {"dv", &Backward::dv},     {"lse", &Backward::lse},
             {"dlse", &Backward::dlse}};
  for (const auto& [name, member] : all) {
    BackwardCall call;
    (call.args.*member).data = nullptr;
    const auto p = call.params();
    BackwardProblem problem;
    EXPECT_TRUE(make_backward_problem(&p, Pointers::kOptional, &problem).ok());
    EXPECT_TRUE(problem.lse.wanted);
    EXPECT_TRUE(problem.dlse.wanted);
    EXPECT_EQ(flash3_backward(&p), FLASH3_INVALID_ARGUMENT);
    EXPECT_EQ(flash3_last_error(), std::string(name) + ".data is null but " + name +
                                       " has elements; only a tensor with a size of 0 needs no "
                                       "memory");
  }
}

TEST(BackwardPointers, DataMustBeAligned) {
  BackwardCall call;
  for (const auto& [name, member] :
       {std::pair{"dk", &Backward::dk}, std::pair{"dlse", &Backward::dlse}}) {
    Backward args = call.args;
    (args.*member).data = reinterpret_cast<void*>(uintptr_t{0x1002});
    const auto p = args.params();
    EXPECT_EQ(flash3_backward(&p), FLASH3_INVALID_ARGUMENT);
    EXPECT_EQ(
        flash3_last_error(),
        std::string(name) + ".data = 0x1002 but it must be a multiple of 4, the size of a float32");
  }
}

TEST(BackwardStructSize, NewerCallersMayLeaveTheirFieldsZero) {
  struct Newer {
    P params;
    unsigned char more[16];
  };
  BackwardCall call;
  Newer newer{};
  newer.params = call.params();
  newer.params.struct_size = sizeof newer;
  BackwardProblem problem;
  EXPECT_TRUE(make_backward_problem(&newer.params, Pointers::kRequired, &problem).ok());

  newer.more[5] = 1;
  const Status status = make_backward_problem(&newer.params, Pointers::kRequired, &problem);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  EXPECT_EQ(
      status.message(),
      "struct_size = " + std::to_string(sizeof newer) + " but this library knows " +
          std::to_string(sizeof newer.params) + " bytes, and byte " +
          std::to_string(sizeof newer.params + 5) +
          " is set; the call was made for a newer flash3 than this one, " FLASH3_VERSION_STRING);
}

// Inputs may be broadcast; gradients may lie in any order and with gaps.
TEST(BackwardAllowed, Strides) {
  BackwardCall call;
  Backward b = call.args;
  b.q.stride[0] = b.k.stride[0] = b.v.stride[1] = 0;
  b.out.stride[1] = b.dout.stride[0] = b.dout.stride[2] = 0;
  b.lse.stride[0] = 0;
  b.dlse.stride[0] = b.dlse.stride[1] = 0;
  b.dq = heads_first(tensor(nullptr, FLASH3_FLOAT32, {2, 4, 3, 8}));
  b.dk.stride[0] = 1000, b.dk.data = nullptr;  // its memory ends before that
  const auto p = b.params();
  BackwardProblem problem;
  const Status status = make_backward_problem(&p, Pointers::kOptional, &problem);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(problem.dq.stride_head, 24);
  EXPECT_EQ(problem.dq.stride_seq, 8);
  EXPECT_EQ(problem.dk.stride_batch, 1000);
  EXPECT_EQ(problem.dout.stride_batch, 0);
}

TEST(BackwardProblemTest, IsTheCall) {
  BackwardCall call;
  call.args.backend = FLASH3_BACKEND_CPU;
  call.args.num_threads = 3;
  call.args.softmax_scale = 0.25f;
  call.args.causal = true;
  call.args.window_left = 1;
  call.args.deterministic = true;
  call.args.stream = &call;
  call.args.workspace = call.dq.data();
  call.args.workspace_size = 12;
  const auto p = call.params();
  BackwardProblem problem;
  ASSERT_TRUE(make_backward_problem(&p, Pointers::kRequired, &problem).ok());
  EXPECT_EQ(problem.dtype, FLASH3_FLOAT32);
  EXPECT_EQ(problem.batch, 2);
  EXPECT_EQ(problem.seq_q, 3);
  EXPECT_EQ(problem.seq_k, 5);
  EXPECT_EQ(problem.queries_per_kv_head(), 2);
  EXPECT_EQ(problem.head_dim, 8);
  EXPECT_EQ(problem.head_dim_v, 16);
  EXPECT_EQ(problem.out.data, p.out.data);
  EXPECT_EQ(problem.lse.data, p.lse.data);
  EXPECT_EQ(problem.dout.data, p.dout.data);
  EXPECT_EQ(problem.dout.dim, 16);
  EXPECT_EQ(problem.dlse.data, p.dlse.data);
  EXPECT_TRUE(problem.dlse.wanted);
  EXPECT_EQ(problem.dlse.stride_head, 3);
  EXPECT_EQ(problem.dq.data, call.dq.data());
  EXPECT_EQ(problem.dk.data, call.dk.data());
  EXPECT_EQ(problem.dk.heads, 2);
  EXPECT_EQ(problem.dv.data, call.dv.data());
  EXPECT_EQ(problem.dv.stride_batch, 160);
  EXPECT_EQ(problem.band().lo, 1);
  EXPECT_EQ(problem.band().hi, 2);
  EXPECT_TRUE(problem.deterministic);
  EXPECT_EQ(problem.softmax_scale, 0.25f);
  EXPECT_EQ(problem.backend, FLASH3_BACKEND_CPU);
  EXPECT_EQ(problem.num_threads, 3);
  EXPECT_EQ(problem.stream, &call);
  EXPECT_EQ(problem.workspace, call.dq.data());
  EXPECT_EQ(problem.workspace_size, 12u);
  EXPECT_FALSE(problem.is_empty());

  BackwardCall plain({}, /*with_dlse=*/false);
  const auto q = plain.params();
  ASSERT_TRUE(make_backward_problem(&q, Pointers::kRequired, &problem).ok());
  EXPECT_FALSE(problem.dlse.wanted);
  EXPECT_FALSE(problem.deterministic);
  EXPECT_FLOAT_EQ(problem.softmax_scale, 1.f / std::sqrt(8.f));
}

// Empty only if there is no gradient at all: no query is no reason to leave dk and dv unwritten.
TEST(BackwardProblemTest, Emptiness) {
  const struct {
    Sizes sizes;
    bool empty;
  } cases[] = {
      {{0, 3, 5, 4, 2, 8, 8}, true},  {{2, 0, 0, 4, 2, 8, 8}, true},
      {{2, 3, 5, 0, 0, 8, 8}, true},  {{2, 3, 0, 0, 2, 8, 8}, true},
      {{2, 0, 5, 4, 2, 8, 8}, false}, {{2, 3, 0, 4, 2, 8, 8}, false},
      {{2, 3, 5, 0, 2, 8, 8}, false}, {{2, 3, 5, 4, 2, 8, 8}, false},
  };
  for (const auto& [sizes, empty] : cases) {
    BackwardCall call(sizes);
    const auto p = call.params();
    BackwardProblem problem;
    ASSERT_TRUE(make_backward_problem(&p, Pointers::kRequired, &problem).ok());
    EXPECT_EQ(problem.is_empty(), empty);
    if (!empty) continue;
    size_t bytes = 77;
    EXPECT_EQ(flash3_backward_supported(&p), FLASH3_OK);
    EXPECT_EQ(flash3_backward_workspace(&p, &bytes), FLASH3_OK);
    EXPECT_EQ(bytes, 0u);
    EXPECT_EQ(flash3_backward(&p), FLASH3_OK);
    EXPECT_EQ(explain(call.args).substr(0, 48),
              "backend: none (the gradients have no elements)\np");
  }
}

TEST(BackwardCApi, NullParams) {
  constexpr char kMessage[] = "params is null; it must point to a flash3_backward_params";
  size_t size = 77;
  EXPECT_EQ(flash3_backward_supported(nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(flash3_backward(nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(flash3_backward_workspace(nullptr, &size), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(flash3_backward_explain(nullptr, nullptr, &size), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(size, 77u);
}

TEST(BackwardCApi, NullResults) {
  BackwardCall call;
  const auto p = call.params();
  char text[16];
  EXPECT_EQ(flash3_backward_workspace(&p, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "bytes is null; it must point to where the result goes");
  EXPECT_EQ(flash3_backward_explain(&p, text, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "size is null; it must point to where the result goes");
}

}  // namespace
}  // namespace flash3::test
