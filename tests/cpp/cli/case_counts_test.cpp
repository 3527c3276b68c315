// SPDX-License-Identifier: Apache-2.0
// What is counted of a case: pairs that are seen, FLOPs, bytes.
#include <gtest/gtest.h>

#include <cmath>

#include "../parsed.hpp"
#include "cases/check.hpp"
#include "cases/mask.hpp"
#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {
namespace {

// flash3.h's definition of the mask, word for word.
int64_t count_pairs(const Case& c) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < c.seq_q; ++i)
    for (int64_t j = 0; j < c.seq_k; ++j) {
      const int64_t diagonal = i + c.seq_k - c.seq_q;
      bool seen = !c.causal || j <= diagonal;
      if (c.window && c.window_left >= 0) seen = seen && j >= diagonal - c.window_left;
      if (c.window && c.window_right >= 0) seen = seen && j <= diagonal + c.window_right;
      const auto chunk_of = [&](int64_t n) { return n >= 0 ? n / c.chunk : -1; };  // -1 or less
      if (c.chunk > 0) seen = seen && chunk_of(j) == chunk_of(diagonal);
      pairs += seen;
    }
  return c.batch * pairs;
}

TEST(Counts, VisiblePairsFollowTheDefinition) {
  for (const Case& c : case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU)))
    EXPECT_EQ(visible_pairs(c), count_pairs(c)) << to_id(c);
}

// What lists say is counted as the oracle's pairs are.
TEST(Counts, SeenPairsAreThoseOfTheMask) {
  const auto pairs_of = [](const Case& c) {
    const auto mask = make_host_mask(c);
    const MaskPairs& pairs = mask->pairs();
    double seen = 0;
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads_q; ++h)
        for (int64_t n = 0; n < c.seq_q * c.seq_k; ++n) seen += pairs.of(b, h)[n];
    return seen;
  };
  for (const Case& c : mask_case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU), false)) {
    const double pairs = pairs_of(c);
    EXPECT_EQ(seen_pairs(c) * static_cast<double>(c.heads_q), pairs) << to_id(c);
    EXPECT_EQ(seen_flops(c), 2 * pairs * static_cast<double>(c.head_dim + c.head_dim_v))
        << to_id(c);
  }
  const std::string head = "bf16/b2/q1000/k1000/h4x2/d8/";
  EXPECT_EQ(seen_pairs(parsed(head + "full")), 2. * 1000 * 1000);
  EXPECT_EQ(seen_flops(parsed(head + "causal")), flops(parsed(head + "causal")));
}

// The masks that calls are timed with, by what they are named after.
TEST(Counts, UsualMasksSeeWhatTheySay) {
  const std::string head = "bf16/b1/q1000/k1300/h2/d8/";
  const auto seen = [&](const std::string& rest) { return seen_pairs(parsed(head + rest)); };
  const auto visible = [&](const std::string& rest) {
    return static_cast<double>(visible_pairs(parsed(head + rest)));
  };
  EXPECT_EQ(seen("full/mask:causal"), visible("causal"));
  EXPECT_EQ(seen("full/mask:prefix0"), visible("causal"));
  EXPECT_EQ(seen("full/mask:prefix1300"), visible("full"));
  EXPECT_EQ(seen("full/mask:prefix400"), visible("causal") + 99. * 100 / 2);  // i' from 300
  EXPECT_EQ(seen("full/mask:sinks0x200"), visible("causal+w199:"));
  EXPECT_EQ(seen("full/mask:sinks16x200"), visible("causal+w199:") + 16. * 1000);
  EXPECT_EQ(seen("full/mask:sinks9999x0"), visible("causal"));
  EXPECT_EQ(seen("full/mask:sinks0x9223372036854775807"), visible("causal"));
  EXPECT_EQ(seen("full/mask:share100of64x64"), visible("full"));
  EXPECT_EQ(seen("full/mask:share9223372036854775807of64x64"), visible("full"));
  // 3 of 13 blocks, of which the last one is half.
  EXPECT_NEAR(seen("full/mask:share25of64x104.h"), 300. * 1000, 15. * 1000);
  EXPECT_NEAR(seen("full/mask:coins.h"), 1300. * 1000 / 2, 1300. * 1000 / 2 * 0.01);
  const Case documents = parsed("bf16/b1/q4096/k4096/h1/d8/causal/mask:lognormal3");
  double pairs = 0;
  for (const int64_t n : log_normal_lengths(4096, 3)) pairs += static_cast<double>(n * (n + 1) / 2);
  EXPECT_EQ(seen_pairs(documents), pairs);
  // Heads have lists of their own, and sequences.
  const auto made =
      make_host_mask(parsed("bf16/b2/q256/k2048/h2/d8/full/mask:share10of128x128.b.h"));
  const auto* const lists = static_cast<const int32_t*>(made->params.block_indices.data);
  const int64_t row = 2 * made->params.block_indices.shape[3];
  for (int64_t other = 1; other < 4; ++other)
    EXPECT_FALSE(std::equal(lists, lists + row, lists + other * row)) << other;
  // No more room than they need.
  EXPECT_EQ(mask_facts(parsed(head + "full/mask:coins.h"))->bits, made->mask.batch * 8 * 11);
}

TEST(Counts, FlopsFollowTheConvention) {
  EXPECT_EQ(flops(parsed("bf16/b2/q8/k16/h3/d64/full")), 4. * 8 * 16 * 64 * 3 * 2);
  EXPECT_EQ(flops(parsed("bf16/b1/q16/k16/h1/d64/causal")), 4. * 16 * 16 * 64 / 2);
  EXPECT_EQ(flops(parsed("bf16/b1/q1/k16/h1/d192x128/causal")), 2. * 16 * (192 + 128));
  EXPECT_EQ(tensor_bytes(parsed("bf16/b1/q4/k8/h2x1/d64x32/full")),
            2 * (4 * 2 * 96 + 8 * 96) + 4 * 4 * 2);
  EXPECT_EQ(flops(parsed("bf16/b2/q8/k16/h3/d64/full/bwd")), 2.5 * 4 * 8 * 16 * 64 * 3 * 2);
  EXPECT_EQ(flops(parsed("bf16/b1/q16/k16/h1/d64/causal/bwd")), 2.5 * 4 * 16 * 16 * 64 / 2);
  EXPECT_EQ(flops(parsed("bf16/b1/q1/k16/h1/d192x128/full/bwd")), 2. * 16 * (3 * 192 + 2 * 128));
  EXPECT_EQ(tensor_bytes(parsed("bf16/b1/q4/k8/h2x1/d64x32/full/bwd/dlse")),
            2 * 2 * (4 * 2 * 96 + 8 * 96) + 2 * 4 * 4 * 2);
  EXPECT_EQ(score_matrix_bytes(parsed("fp32/b2/q4/k8/h3/d64/full")), 4 * 2 * 3 * 4 * 8);
}

}  // namespace
}  // namespace flash3::cases
