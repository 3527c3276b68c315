// SPDX-License-Identifier: Apache-2.0
// flash3::Backward: its fields are the C structure's, and calls do what that says.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "oracle/attention_ref.hpp"

namespace flash3::test {
namespace {

TEST(BackwardArgs, EachReachesItsField) {
  int stream = 0, workspace = 0;
  const auto p = Backward{.softmax_scale = 0.5f,
                          .causal = true,
                          .deterministic = true,
                          .window_right = 7,
                          .backend = FLASH3_BACKEND_CPU,
                          .num_threads = 3,
                          .stream = &stream,
                          .workspace = &workspace,
                          .workspace_size = 9}
                     .params();
  EXPECT_EQ(p.struct_size, sizeof p);
  EXPECT_EQ(p.softmax_scale, 0.5f);
  EXPECT_EQ(p.causal, 1);
  EXPECT_EQ(p.deterministic, 1);
  EXPECT_EQ(p.window, 1);
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, 7);
  EXPECT_EQ(p.backend, FLASH3_BACKEND_CPU);
  EXPECT_EQ(p.num_threads, 3);
  EXPECT_EQ(p.stream, &stream);
  EXPECT_EQ(p.workspace, &workspace);
  EXPECT_EQ(p.workspace_size, 9u);
  EXPECT_EQ(Backward{}.params().window, 0);
  EXPECT_EQ(Backward{}.params().deterministic, 0);
}

// 256-byte aligned workspace for the call, for as long as `memory` lives.
void give_workspace(Backward* args, std::vector<unsigned char>* memory) {
  args->workspace_size = workspace(*args);
  memory->assign(args->workspace_size + 256, 0xFF);
  const auto address = reinterpret_cast<uintptr_t>(memory->data());
  args->workspace = memory->data() + (256 - address % 256) % 256;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5) << i;
}

TEST(BackwardArgs, ComputesWhatTheOracleComputes) {
  for (const bool with_dlse : {false, true}) {
    BackwardCall call({}, with_dlse);
    call.args.causal = true;
    call.args.window_left = 1;
    call.args.deterministic = with_dlse;
    call.run_forward();
    EXPECT_TRUE(supported(call.args));
    std::vector<unsigned char> memory;
    give_workspace(&call.args, &memory);
    backward(call.args);

    const auto p = call.params();
    BackwardProblem problem;
    ASSERT_TRUE(make_backward_problem(&p, Pointers::kRequired, &problem).ok());
    const ReferenceBackward expected = attention_backward_ref(problem);
    expect_near(call.dq, expected.dq);
    expect_near(call.dk, expected.dk);
    expect_near(call.dv, expected.dv);
    EXPECT_TRUE(try_backward(call.args));
  }
}

// No query, or no key, or no query head: what gradients there are, are zero.
TEST(BackwardArgs, WritesZerosWhereNothingIsSeen) {
  for (const Sizes& sizes :
       {Sizes{2, 0, 5, 4, 2, 8, 16}, Sizes{2, 3, 0, 4, 2, 8, 16}, Sizes{2, 3, 5, 0, 2, 8, 16}}) {
    BackwardCall call(sizes);
    std::vector<unsigned char> memory;
    give_workspace(&call.args, &memory);
    backward(call.args);
    for (const auto* gradient : {&call.dq, &call.dk, &call.dv})
      for (const float x : *gradient) ASSERT_EQ(x, 0.f);
  }
}

TEST(BackwardArgs, ExplainStartsWithTheCall) {
  BackwardCall call;
  call.args.backend = FLASH3_BACKEND_CPU;
  call.args.causal = true;
  call.args.softmax_scale = 0.25f;
  call.args.deterministic = true;
  const std::string text = explain(call.args);
  EXPECT_EQ(text.substr(0, text.find('\n', text.find("softmax_scale")) + 1),
            "backend: cpu\n"
            "problem: backward, float32, batch 2, seq_q 3, seq_k 5, heads_q 4, heads_k 2, head_dim "
            "8, head_dim_v 16, with dlse, deterministic\n"
            "mask: query i sees keys j with j <= i + 2\n"
            "softmax_scale: 0.25\n");
  EXPECT_EQ(text.back(), '\n');
}

TEST(BackwardArgs, BackwardThrowsAndTryBackwardReturns) {
  BackwardCall call;
  call.args.dk.shape[3] = 96;
  constexpr char kMessage[] =
      "dk.shape[3] = 96 but k.shape[3] = 8; k and dk must have the same shape";
  try {
    backward(call.args);
    FAIL() << "backward() did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), FLASH3_INVALID_ARGUMENT);
    EXPECT_STREQ(e.what(), kMessage);
  }
  EXPECT_EQ(try_backward(call.args).message(), kMessage);
  EXPECT_EQ(supported(call.args).message(), kMessage);
  EXPECT_THROW(workspace(call.args), Error);
  EXPECT_THROW(explain(call.args), Error);
}

}  // namespace
}  // namespace flash3::test
