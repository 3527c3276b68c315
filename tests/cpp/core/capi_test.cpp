// SPDX-License-Identifier: Apache-2.0
// The C functions: misuse, buffers, names, empty calls, errors per thread.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "c11_user.h"
#include "call.hpp"

namespace flash3::test {
namespace {

TEST(CApi, NullParams) {
  constexpr char kMessage[] = "params is null; it must point to a flash3_forward_params";
  size_t size = 77;
  EXPECT_EQ(flash3_forward_supported(nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(flash3_forward(nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(flash3_forward_workspace(nullptr, &size), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(flash3_forward_explain(nullptr, nullptr, &size), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), kMessage);
  EXPECT_EQ(size, 77u);
}

TEST(CApi, NullResults) {
  Call call;
  const auto p = call.params();
  char text[16];
  EXPECT_EQ(flash3_forward_workspace(&p, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "bytes is null; it must point to where the result goes");
  EXPECT_EQ(flash3_forward_explain(&p, text, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "size is null; it must point to where the result goes");
  EXPECT_EQ(flash3_backend_describe(FLASH3_BACKEND_CPU, text, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "size is null; it must point to where the result goes");
}

TEST(CApi, Names) {
  EXPECT_STREQ(flash3_backend_name(FLASH3_BACKEND_AUTO), "auto");
  EXPECT_STREQ(flash3_backend_name(FLASH3_BACKEND_HOPPER), "hopper");
  EXPECT_STREQ(flash3_backend_name(FLASH3_BACKEND_CPU), "cpu");
  EXPECT_STREQ(flash3_dtype_name(FLASH3_DTYPE_NONE), "none");
  EXPECT_STREQ(flash3_dtype_name(FLASH3_FLOAT16), "float16");
  EXPECT_STREQ(flash3_dtype_name(FLASH3_BFLOAT16), "bfloat16");
  EXPECT_STREQ(flash3_dtype_name(FLASH3_FLOAT32), "float32");
  EXPECT_STREQ(flash3_dtype_name(FLASH3_INT32), "int32");
  EXPECT_STREQ(flash3_dtype_name(FLASH3_INT64), "int64");
  EXPECT_STREQ(flash3_status_name(FLASH3_OK), "ok");
  EXPECT_STREQ(flash3_status_name(FLASH3_INVALID_ARGUMENT), "invalid argument");
  EXPECT_STREQ(flash3_status_name(FLASH3_UNSUPPORTED), "unsupported");
  EXPECT_STREQ(flash3_status_name(FLASH3_CUDA_ERROR), "cuda error");
  EXPECT_STREQ(flash3_status_name(FLASH3_OUT_OF_MEMORY), "out of memory");
  EXPECT_STREQ(flash3_status_name(FLASH3_INTERNAL_ERROR), "internal error");
  for (const int bad : {-1, 99}) {
    EXPECT_STREQ(flash3_backend_name(static_cast<flash3_backend>(bad)), "unknown");
    EXPECT_STREQ(flash3_dtype_name(static_cast<flash3_dtype>(bad)), "unknown");
    EXPECT_STREQ(flash3_status_name(static_cast<flash3_status>(bad)), "unknown");
  }
  EXPECT_STREQ(flash3_version(), FLASH3_VERSION_STRING);
  EXPECT_EQ(std::string(FLASH3_VERSION_STRING), std::to_string(FLASH3_VERSION_MAJOR) + "." +
                                                    std::to_string(FLASH3_VERSION_MINOR) + "." +
                                                    std::to_string(FLASH3_VERSION_PATCH));
}

TEST(CApi, BackendsByBadId) {
  for (const int bad : {-1, 3}) {
    const auto id = static_cast<flash3_backend>(bad);
    const std::string message =
        "backend = " + std::to_string(bad) + " but it must be 0 (auto), 1 (hopper) or 2 (cpu)";
    size_t size = 77;
    EXPECT_EQ(flash3_backend_available(id), FLASH3_INVALID_ARGUMENT);
    EXPECT_EQ(flash3_last_error(), message);
    EXPECT_EQ(flash3_backend_describe(id, nullptr, &size), FLASH3_INVALID_ARGUMENT);
    EXPECT_EQ(flash3_last_error(), message);
    EXPECT_EQ(size, 77u);
  }
}

TEST(CApi, CpuIsAlwaysThere) {
  EXPECT_EQ(flash3_backend_available(FLASH3_BACKEND_CPU), FLASH3_OK);
  EXPECT_EQ(flash3_backend_available(FLASH3_BACKEND_AUTO), FLASH3_OK);
  size_t size = 0;
  ASSERT_EQ(flash3_backend_describe(FLASH3_BACKEND_CPU, nullptr, &size), FLASH3_OK);
  EXPECT_GT(size, 1u);
}

// A buffer of every size from none to too large gets as much of the text as fits, and its NUL.
void expect_buffer_rule(const std::function<flash3_status(char*, size_t*)>& function) {
  size_t full = 0;
  ASSERT_EQ(function(nullptr, &full), FLASH3_OK);
  std::string whole(full, '#');
  size_t size = full;
  ASSERT_EQ(function(whole.data(), &size), FLASH3_OK);
  EXPECT_EQ(size, full);
  ASSERT_EQ(whole.find('\0'), full - 1);
  whole.pop_back();

  for (size_t room = 0; room < full + 3; ++room) {
    std::string buffer(full + 3, '#');
    size = room;
    ASSERT_EQ(function(buffer.data(), &size), FLASH3_OK);
    ASSERT_EQ(size, full);
    const size_t written = std::min(room, full);
    if (written > 0) {
      ASSERT_EQ(buffer.substr(0, written), whole.substr(0, written - 1) + '\0');
    }
    ASSERT_EQ(buffer.substr(written), std::string(full + 3 - written, '#'));
  }
}

TEST(CApi, ExplainBuffer) {
  Call call;
  const auto p = call.params();
  expect_buffer_rule(
      [&](char* buffer, size_t* size) { return flash3_forward_explain(&p, buffer, size); });
}

TEST(CApi, DescribeBuffer) {
  expect_buffer_rule([](char* buffer, size_t* size) {
    return flash3_backend_describe(FLASH3_BACKEND_CPU, buffer, size);
  });
}

TEST(CApi, ExplainStartsWithTheCall) {
  Call call;
  call.args.backend = FLASH3_BACKEND_CPU;
  call.args.causal = true;
  call.args.window_left = 1;
  call.args.softmax_scale = 0.25f;
  const std::string text = explain(call.args);
  EXPECT_EQ(text.substr(0, text.find('\n', text.find("softmax_scale")) + 1),
            "backend: cpu\n"
            "problem: float32, batch 2, seq_q 3, seq_k 5, heads_q 4, heads_k 2, head_dim 8, "
            "head_dim_v 16, with lse\n"
            "mask: query i sees keys j with i + 1 <= j <= i + 2\n"
            "softmax_scale: 0.25\n");
  EXPECT_EQ(text.back(), '\n');

  Call full({}, /*with_lse=*/false);
  const std::string other = explain(full.args);
  EXPECT_NE(other.find("\nchosen by: auto"), std::string::npos) << other;
  EXPECT_NE(other.find("head_dim_v 16\nmask: none\n"), std::string::npos) << other;
}

TEST(CApi, EmptyOutputIsOkAndRunsNothing) {
  for (const Sizes& s : {Sizes{0, 3, 5, 4, 2, 8, 8}, Sizes{2, 0, 5, 4, 2, 8, 8},
                         Sizes{2, 3, 5, 0, 2, 8, 8}, Sizes{2, 3, 5, 0, 0, 8, 8}}) {
    Call call(s);
    for (const flash3_backend backend :
         {FLASH3_BACKEND_AUTO, FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
      auto p = call.params();
      p.backend = backend;
      size_t bytes = 77;
      EXPECT_EQ(flash3_forward_supported(&p), FLASH3_OK);
      EXPECT_EQ(flash3_forward_workspace(&p, &bytes), FLASH3_OK);
      EXPECT_EQ(bytes, 0u);
      EXPECT_EQ(flash3_forward(&p), FLASH3_OK);
      EXPECT_EQ(explain(call.args).substr(0, 45), "backend: none (the output has no elements)\npr");
      p.num_threads = -1;  // still checked
      EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
    }
  }
}

TEST(CApi, EmptyKeysGiveZeroAndMinusInfinity) {
  Call call({2, 3, 0, 4, 2, 8, 16});
  const auto p = call.params();
  ASSERT_EQ(flash3_forward(&p), FLASH3_OK) << flash3_last_error();
  for (const float x : call.out) ASSERT_EQ(x, 0.f);
  for (const float x : call.lse) ASSERT_EQ(x, -INFINITY);
}

TEST(CApi, SuccessKeepsTheLastError) {
  EXPECT_EQ(flash3_forward(nullptr), FLASH3_INVALID_ARGUMENT);
  const std::string before = flash3_last_error();
  EXPECT_EQ(flash3_backend_available(FLASH3_BACKEND_CPU), FLASH3_OK);
  EXPECT_EQ(flash3_last_error(), before);
}

TEST(CApi, LastErrorBelongsToItsThread) {
  flash3_forward(nullptr);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([t, &wrong] {
      if (std::strcmp(flash3_last_error(), "") != 0) ++wrong;
      Call call;
      auto p = call.params();
      for (int n = 0; n < 500; ++n) {
        p.num_threads = -1 - t - 8 * n;
        if (flash3_forward(&p) != FLASH3_INVALID_ARGUMENT) ++wrong;
        if (flash3_last_error() != "num_threads = " + std::to_string(p.num_threads) +
                                       " but it must be at least 0 (0: one per core)")
          ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_STREQ(flash3_last_error(), "params is null; it must point to a flash3_forward_params");
}

TEST(CApi, FromC11) {
  float out = 0.f, lse = 0.f;
  ASSERT_EQ(c11_average(2.f, 5.f, &out, &lse), FLASH3_OK) << flash3_last_error();
  EXPECT_FLOAT_EQ(out, 3.5f);
  EXPECT_FLOAT_EQ(lse, 1.5f + std::log(2.f));
}

// flash3_set_interrupt: a CPU call that takes long ends when its function says so.

std::atomic<int> asked;
std::atomic<bool> asked_elsewhere;
std::thread::id caller;

int answer(int what) {
  ++asked;
  if (std::this_thread::get_id() != caller) asked_elsewhere = true;
  return what;
}
int go_on() { return answer(0); }
int end() { return answer(1); }

class Interrupt : public ::testing::Test {
 protected:
  void SetUp() override { asked = 0, asked_elsewhere = false, caller = std::this_thread::get_id(); }
  void TearDown() override { flash3_set_interrupt(nullptr); }

  // A call that takes many times the pause between two questions, on any machine's two threads.
  static constexpr int64_t kRows = 16384, kHeads = 4, kDim = 128;
  std::vector<float> in_ = std::vector<float>(kRows * kHeads * kDim, 0.25f);
  std::vector<float> out_ = std::vector<float>(kRows * kHeads * kDim),
                     lse_ = std::vector<float>(kRows * kHeads);

  static flash3_tensor rows(float* data) {
    return tensor(data, FLASH3_FLOAT32, {1, kRows, kHeads, kDim});
  }
  flash3_forward_params forward() {
    flash3_forward_params p{};
    p.struct_size = sizeof p;
    p.backend = FLASH3_BACKEND_CPU;
    p.num_threads = 2;
    p.q = p.k = p.v = rows(in_.data());
    p.out = rows(out_.data());
    return p;
  }

  void expect_cancelled(flash3_status status) const {
    EXPECT_EQ(status, FLASH3_CANCELLED);
    EXPECT_EQ(std::string(flash3_last_error()),
              "the function of flash3_set_interrupt ended the call");
    EXPECT_EQ(asked, 1);
    EXPECT_FALSE(asked_elsewhere);
  }
};

TEST_F(Interrupt, EndsAForwardCall) {
  flash3_set_interrupt(end);
  const flash3_forward_params p = forward();
  expect_cancelled(flash3_forward(&p));
}

TEST_F(Interrupt, EndsABackwardCall) {
  flash3_set_interrupt(end);
  std::vector<float> dk(out_.size()), dv(out_.size());
  flash3_backward_params p{};
  p.struct_size = sizeof p;
  p.backend = FLASH3_BACKEND_CPU;
  p.num_threads = 2;
  p.q = p.k = p.v = p.out = p.dout = rows(in_.data());
  p.lse = lse_tensor(lse_.data(), 1, kHeads, kRows);
  p.dq = rows(out_.data()), p.dk = rows(dk.data()), p.dv = rows(dv.data());
  size_t bytes = 0;
  ASSERT_EQ(flash3_backward_workspace(&p, &bytes), FLASH3_OK);
  std::vector<char> workspace(bytes + FLASH3_WORKSPACE_ALIGNMENT);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  p.workspace =
      workspace.data() + (FLASH3_WORKSPACE_ALIGNMENT - address % FLASH3_WORKSPACE_ALIGNMENT);
  p.workspace_size = bytes;
  expect_cancelled(flash3_backward(&p));
}

// The questions do not change a call that goes on, and nothing is asked once a function is taken
// back.
TEST_F(Interrupt, ChangesNothingElse) {
  Call plain, watched;
  flash3_forward_params p = plain.params(), w = watched.params();
  ASSERT_EQ(flash3_forward(&p), FLASH3_OK);
  flash3_set_interrupt(go_on);
  ASSERT_EQ(flash3_forward(&w), FLASH3_OK);
  EXPECT_EQ(plain.out, watched.out);
  EXPECT_EQ(plain.lse, watched.lse);
  flash3_set_interrupt(nullptr);
  asked = 0;
  ASSERT_EQ(flash3_forward(&w), FLASH3_OK);
  EXPECT_EQ(asked, 0);
}

TEST_F(Interrupt, HasAName) { EXPECT_STREQ(flash3_status_name(FLASH3_CANCELLED), "cancelled"); }

}  // namespace
}  // namespace flash3::test
