// SPDX-License-Identifier: Apache-2.0
// flash3_plan: what a plan promises about its runs, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "core/fields.hpp"
#include "flash3/plan.h"

namespace flash3::test {
namespace {

constexpr int64_t kSeq = 4, kHeads = 2, kDim = 8;
constexpr size_t kElements = kSeq * kHeads * kDim;

// Memory of one forward and one backward call, each tensor with values of its own.
struct Memory {
  explicit Memory(float first) {
    float next = first;
    for (auto* t : {&q, &k, &v, &dout})
      for (float& x : *t) {
        next += 0.37f;
        x = std::fmod(next, 3.f) - 1.5f;
      }
  }
  alignas(16) std::array<float, kElements + 4> q, k, v, dout, out{}, dq{}, dk{}, dv{};
  std::array<float, kSeq * kHeads> lse{};
};

flash3_tensor tensor(float* data) {
  flash3_tensor t{};
  t.data = data, t.dtype = FLASH3_FLOAT32, t.ndim = 4;
  const int64_t shape[] = {1, kSeq, kHeads, kDim}, stride[] = {kElements, kHeads * kDim, kDim, 1};
  std::copy_n(shape, 4, t.shape), std::copy_n(stride, 4, t.stride);
  return t;
}

flash3_tensor rows(float* data) {
  flash3_tensor t{};
  t.data = data, t.dtype = FLASH3_FLOAT32, t.ndim = 3;
  const int64_t shape[] = {1, kHeads, kSeq}, stride[] = {kHeads * kSeq, kSeq, 1};
  std::copy_n(shape, 3, t.shape), std::copy_n(stride, 3, t.stride);
  return t;
}

flash3_forward_params forward_params(Memory& m) {
  flash3_forward_params p{};
  p.struct_size = sizeof p;
  p.q = tensor(m.q.data()), p.k = tensor(m.k.data()), p.v = tensor(m.v.data());
  p.out = tensor(m.out.data()), p.lse = rows(m.lse.data());
  p.causal = 1, p.num_threads = 1, p.backend = FLASH3_BACKEND_CPU;
  return p;
}

flash3_backward_params backward_params(Memory& m) {
  flash3_backward_params p{};
  p.struct_size = sizeof p;
  p.q = tensor(m.q.data()), p.k = tensor(m.k.data()), p.v = tensor(m.v.data());
  p.out = tensor(m.out.data()), p.lse = rows(m.lse.data()), p.dout = tensor(m.dout.data());
  p.dq = tensor(m.dq.data()), p.dk = tensor(m.dk.data()), p.dv = tensor(m.dv.data());
  p.causal = 1, p.num_threads = 1, p.backend = FLASH3_BACKEND_CPU;
  return p;
}

std::string explanation(const flash3_plan* plan) {
  size_t size = 0;
  EXPECT_EQ(flash3_plan_explain(plan, nullptr, &size), FLASH3_OK);
  std::string text(size, ' ');
  EXPECT_EQ(flash3_plan_explain(plan, text.data(), &size), FLASH3_OK);
  return text.c_str();
}

class KeptPlanTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(flash3_forward_plan(&params_, &plan_), FLASH3_OK) << flash3_last_error();
  }
  void TearDown() override { flash3_plan_destroy(plan_); }

  // That a run with what `change` makes of the params is refused in these words, and writes
  // nothing.
  template <class Change>
  void expect_refused(const Change& change, const std::string& sentence) {
    flash3_forward_params p = params_;
    change(p);
    const auto before = memory_.out;
    EXPECT_EQ(flash3_forward_run(plan_, &p), FLASH3_INVALID_ARGUMENT) << sentence;
    EXPECT_EQ(std::string(flash3_last_error()), sentence);
    EXPECT_EQ(memory_.out, before);
  }

  Memory memory_{1};
  flash3_forward_params params_ = forward_params(memory_);
  flash3_plan* plan_ = nullptr;
};

TEST_F(KeptPlanTest, RunsWithOtherAddressesAsTheCallDoes) {
  for (float first = 1; first < 20; ++first) {
    Memory kept(first), plain(first);
    const auto run = forward_params(kept), call = forward_params(plain);
    ASSERT_EQ(flash3_forward_run(plan_, &run), FLASH3_OK) << flash3_last_error();
    ASSERT_EQ(flash3_forward(&call), FLASH3_OK);
    EXPECT_EQ(kept.out, plain.out);
    EXPECT_EQ(kept.lse, plain.lse);
    EXPECT_NE(kept.out[0], 0.f);
  }
}

TEST_F(KeptPlanTest, MayBeMadeWithoutAddresses) {
  auto question = params_;
  for (auto* t : {&question.q, &question.k, &question.v, &question.out, &question.lse})
    t->data = nullptr;
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_forward_plan(&question, &plan), FLASH3_OK);
  EXPECT_EQ(flash3_forward_run(plan, &params_), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(flash3_forward_run(plan, &question), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()),
            "q.data is null but q has elements; only a tensor with a size of 0 needs no memory");
  auto worse = params_;
  worse.k.data = memory_.k.data() + 1;
  EXPECT_EQ(flash3_forward_run(plan, &worse), FLASH3_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flash3_last_error()).find("k.data = 0x"), std::string::npos);
  EXPECT_NE(std::string(flash3_last_error()).find("but the plan was made for a multiple of 16"),
            std::string::npos);
  flash3_plan_destroy(plan);
}

TEST_F(KeptPlanTest, RefusesAnAddressOfATensorThatThePlanDoesNotHave) {
  auto more = params_;
  more.sink.data = memory_.lse.data();
  EXPECT_EQ(flash3_forward_run(plan_, &more), FLASH3_INVALID_ARGUMENT);
  const std::string sentence = flash3_last_error();
  EXPECT_EQ(sentence.find("sink.data = 0x"), 0u) << sentence;
  EXPECT_NE(sentence.find(" but the plan was made for null"), std::string::npos) << sentence;
}

// What lies after the sizes of a tensor of fewer dimensions may be anything.
TEST_F(KeptPlanTest, TakesParamsThatDifferInBytesWithoutMeaning) {
  auto same = params_;
  same.lse.shape[3] = 77, same.lse.stride[3] = -1;
  EXPECT_EQ(flash3_forward_run(plan_, &same), FLASH3_OK) << flash3_last_error();
}

TEST_F(KeptPlanTest, TakesAnyAddressWhereThePlansWasUnaligned) {
  auto unaligned = params_;
  unaligned.q.data = memory_.q.data() + 1;
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_forward_plan(&unaligned, &plan), FLASH3_OK);
  EXPECT_EQ(flash3_forward_run(plan, &unaligned), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(flash3_forward_run(plan, &params_), FLASH3_OK) << flash3_last_error();
  flash3_plan_destroy(plan);
}

TEST_F(KeptPlanTest, RefusesWhateverElseDiffers) {
  const std::string rest = "; only addresses, stream and workspace may change";
  expect_refused([](auto& p) { p.q.shape[1] = 3; },
                 "q.shape[1] = 3 but the plan was made for 4" + rest);
  expect_refused([](auto& p) { p.v.stride[2] = 16; },
                 "v.stride[2] = 16 but the plan was made for 8" + rest);
  expect_refused([](auto& p) { p.k.dtype = FLASH3_BFLOAT16; },
                 "k.dtype = bfloat16 but the plan was made for float32" + rest);
  expect_refused([](auto& p) { p.lse = {}; },
                 "lse.dtype = none but the plan was made for float32" + rest);
  expect_refused([](auto& p) { p.sink.dtype = FLASH3_FLOAT32; },
                 "sink.dtype = float32 but the plan was made for none" + rest);
  expect_refused([](auto& p) { p.causal = 0; }, "causal = 0 but the plan was made for 1" + rest);
  expect_refused([](auto& p) { p.softmax_scale = 0.5f; },
                 "softmax_scale = 0.5 but the plan was made for 0" + rest);
  expect_refused([](auto& p) { p.window_right = 7; },
                 "window_right = 7 but the plan was made for 0" + rest);
  expect_refused([](auto& p) { p.num_threads = 2; },
                 "num_threads = 2 but the plan was made for 1" + rest);
  expect_refused([](auto& p) { p.chunk = 2; }, "chunk = 2 but the plan was made for 0" + rest);
  expect_refused([](auto& p) { p.struct_size = 8; },
                 "struct_size = 8 but flash3_forward_params takes " +
                     std::to_string(sizeof(flash3_forward_params)) +
                     " bytes; set struct_size = sizeof(flash3_forward_params)");
  expect_refused([](auto& p) { p.out.data = nullptr; },
                 "out.data is null but out has elements; only a tensor with a size of 0 needs no "
                 "memory");
}

TEST_F(KeptPlanTest, RefusesEachOptionThatDiffers) {
  int options = 0;
  for (const ParamField& field : FieldsOf<flash3_forward_params>::kFields) {
    if (!field.is_option()) continue;
    ++options;
    flash3_forward_params p = params_;
    reinterpret_cast<unsigned char*>(&p)[field.offset] ^= 1;
    EXPECT_EQ(flash3_forward_run(plan_, &p), FLASH3_INVALID_ARGUMENT) << field.name;
    EXPECT_EQ(std::string(flash3_last_error()).find(std::string(field.name) + " = "), 0u)
        << flash3_last_error();
  }
  EXPECT_GT(options, 15);
}

TEST_F(KeptPlanTest, IsRunByManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::array<bool, 8> equal{};
  for (size_t i = 0; i < equal.size(); ++i)
    threads.emplace_back([this, i, &equal] {
      Memory kept(float(i) + 1), plain(float(i) + 1);
      const auto run = forward_params(kept), call = forward_params(plain);
      equal[i] = true;
      for (int n = 0; n < 50; ++n) {
        kept.out.fill(-1), plain.out.fill(-1);
        equal[i] &= flash3_forward_run(plan_, &run) == FLASH3_OK &&
                    flash3_forward(&call) == FLASH3_OK && kept.out == plain.out;
      }
    });
  for (auto& thread : threads) thread.join();
  for (const bool each : equal) EXPECT_TRUE(each);
}

TEST_F(KeptPlanTest, AnswersWhatTheCallAnswers) {
  size_t bytes = 1, of_call = 2;
  EXPECT_EQ(flash3_plan_workspace(plan_, &bytes), FLASH3_OK);
  EXPECT_EQ(flash3_forward_workspace(&params_, &of_call), FLASH3_OK);
  EXPECT_EQ(bytes, of_call);
  size_t size = 0;
  ASSERT_EQ(flash3_forward_explain(&params_, nullptr, &size), FLASH3_OK);
  std::string text(size, ' ');
  ASSERT_EQ(flash3_forward_explain(&params_, text.data(), &size), FLASH3_OK);
  EXPECT_EQ(explanation(plan_), text.c_str());
}

TEST_F(KeptPlanTest, OfTheBackwardNeedsItsWorkspace) {
  ASSERT_EQ(flash3_forward(&params_), FLASH3_OK);
  auto p = backward_params(memory_);
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_backward_plan(&p, &plan), FLASH3_OK) << flash3_last_error();
  size_t bytes = 0;
  ASSERT_EQ(flash3_plan_workspace(plan, &bytes), FLASH3_OK);
  ASSERT_GT(bytes, 0u);
  EXPECT_EQ(flash3_backward_run(plan, &p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()).find("workspace is null but this call needs "), 0u);

  std::vector<unsigned char> workspace(bytes + 256);
  p.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
  p.workspace_size = bytes;
  ASSERT_EQ(flash3_backward_run(plan, &p), FLASH3_OK) << flash3_last_error();
  const auto dq = memory_.dq, dk = memory_.dk, dv = memory_.dv;
  memory_.dq.fill(0), memory_.dk.fill(0), memory_.dv.fill(0);
  ASSERT_EQ(flash3_backward(&p), FLASH3_OK);
  EXPECT_TRUE(dq == memory_.dq && dk == memory_.dk && dv == memory_.dv);
  EXPECT_NE(dq[kElements - 1], 0.f);

  p.deterministic = 1;
  EXPECT_EQ(flash3_backward_run(plan, &p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()).find("deterministic = 1 but the plan was made for 0"),
            0u);
  flash3_plan_destroy(plan);
}

TEST_F(KeptPlanTest, KindsAreNotMistaken) {
  const auto backward = backward_params(memory_);
  EXPECT_EQ(flash3_backward_run(plan_, &backward), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "plan is of a forward call but it must be of a backward call");
  flash3_quantize_params quantize{};
  quantize.struct_size = sizeof quantize;
  EXPECT_EQ(flash3_quantize_run(plan_, &quantize), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "plan is of a forward call but it must be of a quantize call");
  EXPECT_EQ(flash3_forward_run(nullptr, &params_), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "plan is null; it must be one that was made");
}

TEST(KeptPlan, OfACallThatIsWrongIsNotMade) {
  Memory memory(1);
  auto p = forward_params(memory);
  p.k.shape[3] = 7;
  auto* plan = reinterpret_cast<flash3_plan*>(&memory);
  EXPECT_EQ(flash3_forward_plan(&p, &plan), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(flash3_forward_plan(&p, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "plan is null; it must point to where the result goes");
  flash3_plan_destroy(nullptr);
}

TEST(KeptPlan, OfACallWithNothingToWriteDoesNothing) {
  Memory memory(1);
  auto p = forward_params(memory);
  for (auto* t : {&p.q, &p.out}) t->shape[1] = 0;
  p.lse.shape[2] = 0;
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_forward_plan(&p, &plan), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_OK) << flash3_last_error();
  EXPECT_NE(explanation(plan).find("backend: none"), std::string::npos);
  flash3_plan_destroy(plan);
}

}  // namespace
}  // namespace flash3::test
