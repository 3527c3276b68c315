// SPDX-License-Identifier: Apache-2.0
// flash3_merge on the CPU, against the formula of merge.h in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cases/tensors.hpp"
#include "core/convert.hpp"
#include "flash3/flash3.hpp"

namespace flash3::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct MergeSpec {
  int64_t parts = 3, rows = 5, heads = 4, dim = 40;
  flash3_dtype dtype = FLASH3_FLOAT32;
  bool sink = false, lse = true;
  int threads = 2;
};

// Part s of row i and head h saw no key where their sum is divisible; row 0 saw none at all.
void check(const MergeSpec& c) {
  const auto count = static_cast<size_t>(c.rows * c.heads);
  std::vector<float> parts(static_cast<size_t>(c.parts * c.rows * c.heads * c.dim)), sink;
  std::vector<float> lses(static_cast<size_t>(c.parts) * count), lse(count, -7.f);
  std::vector<std::byte> out(count * static_cast<size_t>(c.dim) * 4, std::byte{0xFF});
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = cases::normal_value(1, i);
  for (int64_t s = 0; s < c.parts; ++s)
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t i = 0; i < c.rows; ++i) {
        const bool unseen = i == 0 || (s + h + i) % 4 == 0;
        const auto at = static_cast<size_t>((s * c.heads + h) * c.rows + i);
        lses[at] = unseen ? -kInfinity : 20 * cases::normal_value(2, at);
        for (int64_t d = 0; unseen && d < c.dim; ++d)
          parts[static_cast<size_t>(((s * c.rows + i) * c.heads + h) * c.dim + d)] = kNan;
      }
  for (int64_t h = 0; h < c.heads; ++h)
    sink.push_back(h == 1 ? -kInfinity : cases::normal_value(3, static_cast<uint64_t>(h)));

  merge({.out_parts = tensor(parts.data(), FLASH3_FLOAT32, {c.parts, c.rows, c.heads, c.dim}),
         .lse_parts = lse_tensor(lses.data(), c.parts, c.heads, c.rows),
         .out = packed_tensor(out.data(), c.dtype, {c.rows, c.heads, c.dim}),
         .lse = c.lse ? packed_lse_tensor(lse.data(), c.heads, c.rows) : Tensor{},
         .sink = c.sink ? sink_tensor(sink.data(), FLASH3_FLOAT32, c.heads) : Tensor{},
         .backend = FLASH3_BACKEND_CPU,
         .num_threads = c.threads});

  const double step = c.dtype == FLASH3_FLOAT32    ? 1e-6
                      : c.dtype == FLASH3_BFLOAT16 ? std::exp2(-8)
                                                   : std::exp2(-11);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t h = 0; h < c.heads; ++h) {
      double sum = c.sink ? std::exp(double{sink[static_cast<size_t>(h)]}) : 0;
      std::vector<double> want(static_cast<size_t>(c.dim));
      for (int64_t s = 0; s < c.parts; ++s) {
        const float of_part = lses[static_cast<size_t>((s * c.heads + h) * c.rows + i)];
        if (of_part == -kInfinity) continue;
        sum += std::exp(double{of_part});
        for (int64_t d = 0; d < c.dim; ++d)
          want[static_cast<size_t>(d)] +=
              std::exp(double{of_part}) *
              double{parts[static_cast<size_t>(((s * c.rows + i) * c.heads + h) * c.dim + d)]};
      }
      for (int64_t d = 0; d < c.dim; ++d) {
        const double exact = sum == 0 ? 0 : want[static_cast<size_t>(d)] / sum;
        const float got = load_float(out.data(), c.dtype, (i * c.heads + h) * c.dim + d);
        ASSERT_NEAR(got, exact, step * std::abs(exact) + 1e-5) << "row " << i << ", head " << h;
      }
      const float got = lse[static_cast<size_t>(h * c.rows + i)];
      if (!c.lse)
        ASSERT_EQ(got, -7.f);
      else if (sum == 0)
        ASSERT_EQ(got, -kInfinity);
      else
        ASSERT_NEAR(got, std::log(sum), 1e-5) << "row " << i << ", head " << h;
    }
}

TEST(Merge, IsTheFormula) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16})
    for (const bool sink : {false, true}) {
      check({.dtype = dtype, .sink = sink});
      check({.parts = 1, .rows = 1, .dtype = dtype, .sink = sink});
      check({.parts = 70, .rows = 40, .heads = 3, .dim = 1, .dtype = dtype, .sink = sink});
      check({.rows = 33, .heads = 9, .dim = 256, .dtype = dtype, .sink = sink, .lse = false});
      check({.parts = 3, .rows = 5, .heads = 2, .dim = 512, .dtype = dtype, .sink = sink});
    }
}

TEST(Merge, NoPartsAreRowsThatSawNothing) {
  for (const bool sink : {false, true}) check({.parts = 0, .sink = sink});
}

// Largest and smallest scores, which must not overflow, and NaN, which must stay.
TEST(Merge, SpecialValues) {
  std::vector<float> parts{1.f, 2.f, 3.f, 4.f}, lses{1e30f, kNan, 1e30f, 5.f}, out(2), lse(2);
  const Merge args{.out_parts = tensor(parts.data(), FLASH3_FLOAT32, {2, 2, 1, 1}),
                   .lse_parts = lse_tensor(lses.data(), 2, 1, 2),
                   .out = packed_tensor(out.data(), FLASH3_FLOAT32, {2, 1, 1}),
                   .lse = packed_lse_tensor(lse.data(), 1, 2),
                   .backend = FLASH3_BACKEND_CPU};
  merge(args);
  EXPECT_EQ(out[0], 2.f);
  EXPECT_EQ(lse[0], 1e30f);
  EXPECT_TRUE(std::isnan(out[1]) && std::isnan(lse[1]));
}

}  // namespace
}  // namespace flash3::test
