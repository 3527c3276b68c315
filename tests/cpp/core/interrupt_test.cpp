// SPDX-License-Identifier: Apache-2.0
// flash3_set_interrupt: a CPU call that takes long ends when its function says so.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "call.hpp"

namespace flash3::test {
namespace {

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
