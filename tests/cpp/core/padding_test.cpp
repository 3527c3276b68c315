// SPDX-License-Identifier: Apache-2.0
// fill_padding, on host memory: which rows it fills, with what, and that nothing else changes.
#include <algorithm>
#include <cmath>
#include <limits>

#include "call.hpp"

namespace flash3::test {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Rows 0 … 5 of a RaggedCall: those of tokens that count are 0, 1 and 2.
bool counts(int64_t row) { return row < 3; }

TEST(FillPadding, FillsRowsOfNoTokenAndNoOther) {
  RaggedCall plain, filled;
  Forward call = filled.forward();
  forward(plain.forward());
  call.fill_padding = true;
  forward(call);
  for (int64_t row = 0; row < RaggedCall::kTotalQ; ++row) {
    for (int64_t i = row * 64; i < (row + 1) * 64; ++i) {
      EXPECT_EQ(filled.out[size_t(i)], counts(row) ? plain.out[size_t(i)] : 0.f) << i;
      if (!counts(row)) {
        EXPECT_EQ(plain.out[size_t(i)], Call::kUntouched) << i;
      }
    }
    for (int64_t head = 0; head < 4; ++head) {
      const auto at = size_t(head * RaggedCall::kTotalQ + row);
      EXPECT_EQ(filled.lse[at], counts(row) ? plain.lse[at] : kNothing) << at;
    }
  }
}

TEST(FillPadding, WithoutSequencesFillsAll) {
  RaggedCall memory;
  Forward call = memory.forward();
  call.cu_seqlens_q.shape[0] = call.cu_seqlens_k.shape[0] = 1;
  call.seqused_q.shape[0] = call.seqused_k.shape[0] = 0;
  call.fill_padding = true;
  forward(call);
  for (const float x : memory.out) EXPECT_EQ(x, 0.f);
  for (const float x : memory.lse) EXPECT_EQ(x, kNothing);
}

TEST(FillPadding, FillsGradientsOfRowsOfNoSequence) {
  RaggedCall memory;
  forward(memory.forward());
  for (auto* gradient : {&memory.dq, &memory.dk, &memory.dv})
    std::fill(gradient->begin(), gradient->end(), NAN);
  alignas(FLASH3_WORKSPACE_ALIGNMENT) static char workspace[1 << 16];
  Backward call = memory.backward();
  call.num_threads = 1;
  call.workspace = workspace;
  call.workspace_size = sizeof workspace;
  std::fill(memory.dout.begin(), memory.dout.end(), 1.f);
  std::fill(memory.dlse.begin(), memory.dlse.end(), 0.f);
  backward(call);
  EXPECT_TRUE(std::isnan(memory.dq[5 * 32]));  // as it was
  call.fill_padding = true;
  backward(call);
  for (size_t i = 5 * 32; i < 6 * 32; ++i) EXPECT_EQ(memory.dq[i], 0.f) << i;
  for (size_t i = 8 * 16; i < 9 * 16; ++i) EXPECT_EQ(memory.dk[i], 0.f) << i;
  for (size_t i = 8 * 32; i < 9 * 32; ++i) EXPECT_EQ(memory.dv[i], 0.f) << i;
  for (const auto* gradient : {&memory.dq, &memory.dk, &memory.dv})
    for (const float x : *gradient) EXPECT_FALSE(std::isnan(x));
}

TEST(FillPadding, NothingIsFilledWhereLengthsAreRefused) {
  RaggedCall memory;
  memory.cu_q = {0, 5, 2};
  Forward call = memory.forward();
  call.fill_padding = true;
  EXPECT_THROW(forward(call), Error);
  for (const float x : memory.out) EXPECT_EQ(x, Call::kUntouched);
}

TEST(FillPadding, IsAFlag) {
  RaggedCall memory;
  flash3_forward_params p = memory.forward().params();
  p.fill_padding = 2;
  EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "fill_padding = 2 but it must be 0 or 1");
  flash3_backward_params b = memory.backward().params();
  b.fill_padding = -1;
  EXPECT_EQ(flash3_backward(&b), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "fill_padding = -1 but it must be 0 or 1");
}

TEST(FillPadding, IsExplained) {
  RaggedCall memory;
  Forward call = memory.forward();
  EXPECT_EQ(explain(call).find("padding"), std::string::npos);
  call.fill_padding = true;
  EXPECT_NE(explain(call).find("padding: rows that belong to no token are filled at the end\n"),
            std::string::npos);
}

}  // namespace
}  // namespace flash3::test
