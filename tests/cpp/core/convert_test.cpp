// SPDX-License-Identifier: Apache-2.0
// 16-bit floats: every bit pattern both ways, and the rounding between each two neighbours.

#include "core/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "core/fp8.hpp"
#include "core/rotation.hpp"
#include "oracle/definition.hpp"

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

// What host and kernels share of FP8: conversions against a reference written from the format's
// definition, the scale rule, the signs of the rotation, and where scales of blocks lie.

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

static_assert(float_to_e4m3(448.f) == 0x7E && e4m3_to_float(0x08) == 0x1p-6f);
static_assert(scale_of_amax(448.f) == 1.f && rotation_part(96, 64).size == 32);

// From the definition: 1.m · 2^(e − 7), or 0.m · 2^-6.
double value_of(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15), mantissa = static_cast<int>(code & 7);
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
  return code & 0x80 ? -size : size;
}

TEST(E4m3, EveryCode) {
  for (unsigned code = 0; code < 256; ++code) {
    const float x = e4m3_to_float(static_cast<unsigned char>(code));
    EXPECT_EQ(std::signbit(x), code >= 128) << code;
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(x)) << code;
      EXPECT_EQ(float_to_e4m3(x), kE4m3Nan);
      continue;
    }
    EXPECT_EQ(x, value_of(code)) << code;
    EXPECT_EQ(float_to_e4m3(x), code);
    EXPECT_EQ(e4m3_code_ref(x), code);
  }
}

TEST(E4m3, RoundsToNearestEvenAndSaturates) {
  for (unsigned code = 0; code < 0x7E; ++code) {
    const auto middle = static_cast<float>((value_of(code) + value_of(code + 1)) / 2);
    const unsigned even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(float_to_e4m3(middle), even) << code;
    EXPECT_EQ(float_to_e4m3(-middle), even | 0x80) << code;
    EXPECT_EQ(float_to_e4m3(std::nextafter(middle, 0.f)), code);
    EXPECT_EQ(float_to_e4m3(std::nextafter(middle, kInf)), code + 1);
  }
  for (const float x : {448.5f, 464.f, 465.f, 1e30f, kInf}) {
    EXPECT_EQ(float_to_e4m3(x), 0x7E) << x;
    EXPECT_EQ(float_to_e4m3(-x), 0xFE) << x;
  }
  EXPECT_EQ(float_to_e4m3(0.f), 0);
  EXPECT_EQ(float_to_e4m3(-0.f), 0x80);
  EXPECT_EQ(float_to_e4m3(-std::numeric_limits<float>::denorm_min()), 0x80);
  for (const unsigned bits : {0x7F800001u, 0xFFFFFFFFu, 0x7FFFFFFFu})
    EXPECT_EQ(float_to_e4m3(float_of(bits)), kE4m3Nan);
}

TEST(E4m3, RandomFloatsAsTheReference) {
  std::mt19937 random(7);
  for (int i = 0; i < 2'000'000; ++i) {
    // All bit patterns, then those near the values of the format.
    auto bits = static_cast<unsigned>(random());  // 32 bits, whatever type the generator gives
    if (i % 2 != 0) bits = (bits & 0x807FFFFFu) | ((bits >> 8) % 24 + 113) << 23;
    const float x = float_of(bits);
    ASSERT_EQ(float_to_e4m3(x), e4m3_code_ref(x)) << std::hexfloat << x;
  }
}

TEST(Scale, IsTheSmallestPowerOfTwoThatHolds) {
  EXPECT_EQ(scale_of_amax(0.f), 1.f);
  for (const float amax : {kInf, kNaN, -kNaN}) EXPECT_TRUE(std::isnan(scale_of_amax(amax)));
  for (int exponent = -149; exponent < 128; ++exponent)
    for (const float mantissa : {1.f, 1.0000001f, 1.5f, 1.75f, 1.7500001f, 1.9999999f}) {
      const float amax = std::ldexp(mantissa, exponent);
      const float scale = scale_of_amax(amax);
      ASSERT_EQ(scale, scale_ref(amax)) << amax;
      ASSERT_TRUE(std::isnormal(scale) && std::isnormal(1.f / scale)) << amax;
      ASSERT_EQ(reciprocal_of_scale(scale), 1.f / scale) << amax;
      ASSERT_LE(amax / scale, 448.f) << amax;
      if (scale > 0x1p-126f) {
        ASSERT_GT(amax / (scale / 2), 448.f) << amax;
      }
    }
  EXPECT_TRUE(std::isnan(reciprocal_of_scale(kNaN)));
}

// The published first outputs of SplitMix64 with this seed.
TEST(Rotation, SignsAreSplitMix64) {
  constexpr unsigned long long kExpected[] = {6457827717110365317ull, 3203168211198807973ull,
                                              9817491932198370423ull, 4593380528125082431ull};
  for (int w = 0; w < 4; ++w) EXPECT_EQ(rotation_word(1234567, w), kExpected[w]);
  for (int i = 0; i < 256; ++i)
    EXPECT_EQ(rotation_negates(1234567, i), (kExpected[i / 64] >> (i % 64) & 1) != 0);
}

TEST(Rotation, PartsAreTheBinaryDigitsOfTheHeadDim) {
  for (int dim = 1; dim <= 256; ++dim) {
    int next = 0, last_size = 512;
    for (int i = 0; i < dim; ++i) {
      const RotationPart part = rotation_part(dim, i);
      ASSERT_LE(part.begin, i);
      ASSERT_LT(i, part.begin + part.size);
      if (i != next) continue;
      ASSERT_EQ(part.begin, i);
      ASSERT_EQ(part.size & (part.size - 1), 0);
      ASSERT_LT(part.size, last_size);
      next += last_size = part.size;
    }
    ASSERT_EQ(next, dim);
  }
}

// Two sequences of a packed tensor never share a block, and all fit.
TEST(ScaleBlocks, OfPackedTensorsAreApart) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    const int batch = static_cast<int>(random() % 9);
    std::vector<int> cu{static_cast<int>(random() % 200)};
    for (int b = 0; b < batch; ++b) {
      const int lengths[] = {0, 1, 127, 128, 129, 256, static_cast<int>(random() % 1000)};
      cu.push_back(cu.back() + lengths[random() % 7]);
    }
    Sequences s;
    s.packed = true;
    s.cu = cu.data();
    s.rows = s.max_length = cu.back() + static_cast<int>(random() % 50);
    std::set<Index> used;
    for (int b = 0; b < batch; ++b) {
      const RowRange rows = rows_of(s, b);
      for (Index i = 0; i < rows.length; i += kScaleBlock) {
        const Index block = scale_block(s, rows, b, i);
        ASSERT_EQ(block, cu[static_cast<size_t>(b)] / 128 + b + i / 128);
        ASSERT_TRUE(used.insert(block).second);
        ASSERT_LT(block, scale_blocks(s, batch));
      }
    }
  }
}

TEST(ScaleBlocks, OfOthersCountFromTheirFirstRow) {
  Sequences s;
  s.rows = s.max_length = 300;
  EXPECT_EQ(scale_blocks(s, 5), 3);
  EXPECT_EQ(scale_block(s, rows_of(s, 4), 4, 299), 2);
  s.rows = 0;
  EXPECT_EQ(scale_blocks(s, 5), 0);
}

}  // namespace
}  // namespace flash3
