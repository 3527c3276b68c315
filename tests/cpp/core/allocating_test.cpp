// SPDX-License-Identifier: Apache-2.0
// Calls that ask for their workspace: when, how often and for how much, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "flash3/plan.h"

namespace flash3::test {
namespace {

constexpr int64_t kSeq = 4, kHeads = 2, kDim = 8;
constexpr size_t kElements = kSeq * kHeads * kDim;

flash3_tensor tensor(float* data, int32_t ndim = 4) {
  flash3_tensor t{};
  t.data = data, t.dtype = FLASH3_FLOAT32, t.ndim = ndim;
  const int64_t shape[] = {1, kSeq, kHeads, kDim}, stride[] = {kElements, kHeads * kDim, kDim, 1};
  const int64_t row_shape[] = {1, kHeads, kSeq}, row_stride[] = {kHeads * kSeq, kSeq, 1};
  std::copy_n(ndim == 4 ? shape : row_shape, ndim, t.shape);
  std::copy_n(ndim == 4 ? stride : row_stride, ndim, t.stride);
  return t;
}

// Gives the same memory each time, or null, and notes what it was asked for.
struct Allocator {
  static void* give(size_t bytes, void* context) {
    auto* const allocator = static_cast<Allocator*>(context);
    ++allocator->calls;
    allocator->bytes = bytes;
    return allocator->given;
  }

  alignas(FLASH3_WORKSPACE_ALIGNMENT) std::array<unsigned char, 1 << 16> memory{};
  void* given = memory.data();
  int calls = 0;
  size_t bytes = 0;
};

class AllocatingTest : public testing::Test {
 protected:
  AllocatingTest() {
    float next = 0;
    for (auto* t : {&q_, &k_, &v_, &dout_})
      for (float& x : *t) {
        next += 0.37f;
        x = std::fmod(next, 3.f) - 1.5f;
      }
    forward_.struct_size = sizeof forward_;
    forward_.q = tensor(q_.data()), forward_.k = tensor(k_.data()), forward_.v = tensor(v_.data());
    forward_.out = tensor(out_.data()), forward_.lse = tensor(lse_.data(), 3);
    forward_.causal = 1, forward_.num_threads = 1, forward_.backend = FLASH3_BACKEND_CPU;
    EXPECT_EQ(flash3_forward(&forward_), FLASH3_OK) << flash3_last_error();
    backward_.struct_size = sizeof backward_;
    backward_.q = forward_.q, backward_.k = forward_.k, backward_.v = forward_.v;
    backward_.out = forward_.out, backward_.lse = forward_.lse;
    backward_.dout = tensor(dout_.data()), backward_.dq = tensor(dq_.data());
    backward_.dk = tensor(dk_.data()), backward_.dv = tensor(dv_.data());
    backward_.causal = 1, backward_.num_threads = 1, backward_.backend = FLASH3_BACKEND_CPU;
    EXPECT_EQ(flash3_backward_workspace(&backward_, &needed_), FLASH3_OK);
  }

  flash3_status run_backward(Allocator* allocator) {
    return flash3_backward_allocating(&backward_, Allocator::give, allocator);
  }

  // That the backward is refused in these words, and writes nothing.
  void expect_refused(Allocator* allocator, flash3_status status, const std::string& beginning) {
    EXPECT_EQ(run_backward(allocator), status);
    EXPECT_EQ(std::string(flash3_last_error()).substr(0, beginning.size()), beginning);
    EXPECT_EQ(dq_, decltype(dq_){});
    EXPECT_EQ(allocator->memory, decltype(allocator->memory){});
  }

  std::array<float, kElements> q_, k_, v_, dout_, out_{}, dq_{}, dk_{}, dv_{};
  std::array<float, kSeq * kHeads> lse_{};
  flash3_forward_params forward_{};
  flash3_backward_params backward_{};
  size_t needed_ = 0;
};

TEST_F(AllocatingTest, AsksOnceForWhatTheCallNeeds) {
  Allocator allocator;
  ASSERT_GT(needed_, 0u);
  // The params' own is not looked at.
  backward_.workspace = reinterpret_cast<void*>(uintptr_t{1}), backward_.workspace_size = 5;
  ASSERT_EQ(run_backward(&allocator), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(allocator.calls, 1);
  EXPECT_EQ(allocator.bytes, needed_);
  const auto dq = dq_, dk = dk_, dv = dv_;
  EXPECT_NE(dq[kElements - 1], 0.f);
  dq_ = dk_ = dv_ = {};
  backward_.workspace = allocator.memory.data(), backward_.workspace_size = needed_;
  ASSERT_EQ(flash3_backward(&backward_), FLASH3_OK) << flash3_last_error();
  EXPECT_TRUE(dq == dq_ && dk == dk_ && dv == dv_);
}

TEST_F(AllocatingTest, AsksForNothingWhereNothingIsNeeded) {
  Allocator allocator;
  const auto out = out_, nothing = decltype(out_){};
  out_ = nothing;
  forward_.workspace = reinterpret_cast<void*>(uintptr_t{1}), forward_.workspace_size = 5;
  ASSERT_EQ(flash3_forward_allocating(&forward_, Allocator::give, &allocator), FLASH3_OK)
      << flash3_last_error();
  EXPECT_EQ(out_, out);
  forward_.q.shape[1] = forward_.out.shape[1] = forward_.lse.shape[2] = 0;  // nothing to write
  ASSERT_EQ(flash3_forward_allocating(&forward_, Allocator::give, &allocator), FLASH3_OK);
  EXPECT_EQ(allocator.calls, 0);
}

TEST_F(AllocatingTest, RefusesWhatIsNoWorkspace) {
  Allocator allocator;
  allocator.given = nullptr;
  expect_refused(&allocator, FLASH3_OUT_OF_MEMORY,
                 "allocate gave no workspace of " + std::to_string(needed_) + " bytes");
  allocator.given = allocator.memory.data() + 16;
  expect_refused(&allocator, FLASH3_INVALID_ARGUMENT, "workspace = 0x");
  EXPECT_NE(std::string(flash3_last_error()).find("but it must be a multiple of 256"),
            std::string::npos);
  alignas(FLASH3_WORKSPACE_ALIGNMENT) std::array<float, kElements> dv{};
  backward_.dv = tensor(dv.data());
  allocator.given = dv.data();
  expect_refused(&allocator, FLASH3_INVALID_ARGUMENT, "dv at 0x");
  EXPECT_NE(std::string(flash3_last_error()).find("share memory"), std::string::npos);
  EXPECT_EQ(allocator.calls, 3);
  EXPECT_EQ(flash3_backward_allocating(&backward_, nullptr, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "allocate is null; it must be what gives a workspace");
}

TEST_F(AllocatingTest, ChecksTheCallBeforeItAsks) {
  Allocator allocator;
  backward_.k.shape[1] = 3;
  EXPECT_EQ(run_backward(&allocator), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(flash3_forward_allocating(nullptr, Allocator::give, &allocator),
            FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "params is null; it must point to a flash3_forward_params");
  EXPECT_EQ(allocator.calls, 0);
}

}  // namespace
}  // namespace flash3::test
