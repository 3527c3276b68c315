// SPDX-License-Identifier: Apache-2.0
// 16-bit floats: every bit pattern both ways, and the rounding between each two neighbours.
#include "core/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace flash3 {
namespace {

// The value of a finite bit pattern from the definition of a binary float.
double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(mantissa + (1u << mantissa_bits),
                                                      int(exponent) - bias - mantissa_bits);
  return bits >> (exponent_bits + mantissa_bits) ? -magnitude : magnitude;
}

struct Format {
  const char* name;
  int exponent_bits, mantissa_bits;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);

  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
};

class Convert : public testing::TestWithParam<Format> {};

TEST_P(Convert, EveryBitPattern) {
  const Format& f = GetParam();
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float x = f.to_float(static_cast<uint16_t>(bits));
    const uint32_t magnitude = bits & 0x7FFF;
    const uint32_t back = f.from_float(x);
    ASSERT_EQ(std::signbit(x), bits >> 15 != 0) << bits;
    if (magnitude > f.infinity()) {
      ASSERT_TRUE(std::isnan(x)) << bits;
      ASSERT_GT(back & 0x7FFF, f.infinity()) << bits;  // NaN stays NaN
      ASSERT_EQ(back >> 15, bits >> 15) << bits;       // and keeps its sign
    } else {
      if (magnitude == f.infinity())
        ASSERT_TRUE(std::isinf(x)) << bits;
      else
        ASSERT_EQ(x, value_of(bits, f.exponent_bits, f.mantissa_bits)) << bits;
      ASSERT_EQ(back, bits);
    }
  }
}

// Below the midpoint of two neighbours: down; above: up; on it: to the even one. The neighbour of
// the largest finite value counts as infinity, half a step further on.
TEST_P(Convert, RoundsToNearestEven) {
  const Format& f = GetParam();
  for (uint32_t bits = 0; bits < f.infinity(); ++bits) {
    const double low = value_of(bits, f.exponent_bits, f.mantissa_bits);
    const double high = value_of(bits + 1, f.exponent_bits, f.mantissa_bits);
    const float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(middle, (low + high) / 2);  // float holds the midpoint exactly
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(f.from_float(middle), even) << bits;
    ASSERT_EQ(f.from_float(-middle), even | 0x8000) << bits;
    ASSERT_EQ(f.from_float(std::nextafter(middle, 0.f)), bits) << bits;
    ASSERT_EQ(f.from_float(std::nextafter(middle, INFINITY)), bits + 1) << bits;
  }
  EXPECT_EQ(f.from_float(std::numeric_limits<float>::max()), f.infinity());
  EXPECT_EQ(f.from_float(-INFINITY), f.infinity() | 0x8000);
  EXPECT_EQ(f.from_float(-0.f), 0x8000);
}

// A NaN whose payload lies only in the bits that are dropped must not become infinity.
TEST_P(Convert, SmallNanPayload) {
  const Format& f = GetParam();
  EXPECT_GT(f.from_float(std::bit_cast<float>(0x7F800001u)) & 0x7FFF, f.infinity());
  EXPECT_GT(f.from_float(std::bit_cast<float>(0x7FFFFFFFu)) & 0x7FFF, f.infinity());
}

INSTANTIATE_TEST_SUITE_P(
    Formats, Convert,
    testing::Values(Format{"float16", 5, 10, float16_to_float, float_to_float16},
                    Format{"bfloat16", 8, 7, bfloat16_to_float, float_to_bfloat16}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(Convert, LoadAndStoreByDtype) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT16, FLASH3_BFLOAT16, FLASH3_FLOAT32}) {
    float memory[4] = {};  // room for any of them
    store_float(memory, dtype, 1, -1.5f);
    EXPECT_EQ(load_float(memory, dtype, 1), -1.5f);
    EXPECT_EQ(load_float(memory, dtype, 0), 0.f);
    EXPECT_EQ(load_float(memory, dtype, 2), 0.f);
  }
  uint16_t half[2] = {};
  store_float(half, FLASH3_FLOAT16, 1, 1.f);
  EXPECT_EQ(half[1], 0x3C00);
  store_float(half, FLASH3_BFLOAT16, 1, 1.f);
  EXPECT_EQ(half[1], 0x3F80);
}

}  // namespace
}  // namespace flash3
