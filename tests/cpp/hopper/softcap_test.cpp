// SPDX-License-Identifier: Apache-2.0
// The arithmetic of soft-capped scores, as the kernels have it: against tanh in double precision.
#include "cuda/device/score/softcap.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace flash3::cuda::sm90 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// What a kernel computes of a raw score: ModOf<kSoftcap> in device/score/softcap.cuh.
float capped(const Softcap& cap, float s) {
  if (std::abs(s) > cap.range)
    s = std::copysign(cap.remapped(std::exp2(cap.log2_u * std::abs(s))), s);
  return s * cap.factor(s);
}

struct Call {
  float softmax_scale, softcap;
};
constexpr Call kCalls[] = {{0.0625f, 50.f},  {0.125f, 30.f},          {1.f, 1.f},
                           {0.3f, 0.01f},    {1e-12f, 1e-6f * 1.01f}, {0.99f, 1e-6f * 1.01f},
                           {1.01f, 0.99e6f}, {0.99e12f, 0.99e6f}};

TEST(Softcap, IsTanhWithinItsBound) {
  for (const auto& [scale, softcap] : kCalls) {
    const double unit = softcap * std::numbers::log2e;
    const Softcap cap = make_softcap(scale, softcap, unit);
    double worst = 0;
    for (double x = 1e-6; x < 60; x *= 1.0001) {
      const auto s = static_cast<float>(x * softcap / scale);
      const double want = std::tanh(double{s} * scale / softcap);
      const double got = capped(cap, s) / unit;
      ASSERT_NEAR(got, want, 0x1.6p-18 + 0x1p-22) << scale << " " << softcap << " at x = " << x;
      ASSERT_NEAR(got, want, 1e-4 * want) << scale << " " << softcap << " at x = " << x;
      ASSERT_EQ(capped(cap, -s), -capped(cap, s));
      worst = std::max(worst, std::abs(got - want));
    }
    EXPECT_GT(worst, 0x1p-18) << "the bound could be closer";
  }
}

TEST(Softcap, OfInfinityIsTheCapAndOfAHiddenScoreMinusInfinity) {
  for (const auto& [scale, softcap] : kCalls) {
    const Softcap cap = make_softcap(scale, softcap, 1);
    EXPECT_NEAR(capped(cap, kInf), 1, 0x1p-18);
    EXPECT_GE(capped(cap, kInf), 1) << "so that 1 - tanh², saturated, is 0";
    EXPECT_EQ(capped(cap, -kInf), -capped(cap, kInf));
    EXPECT_TRUE(std::isnan(capped(cap, std::nanf(""))));
    // Hidden scores come after remap_scores().
    EXPECT_EQ(-kInf * cap.factor(-kInf), -kInf);
  }
}

// So that the largest of a row's scores stays the largest, whichever have been moved.
TEST(Softcap, KeepsTheOrderOfScores) {
  const Softcap cap = make_softcap(0.125, 50, 1);
  float before = 0;
  for (double x = 0.01; x < 6; x += 0.01) {
    const float now = capped(cap, static_cast<float>(x * 50 / 0.125));
    EXPECT_GE(now, before - 0x1p-16f) << x;
    EXPECT_LE(now, 1 + 0x1p-17f) << x;
    before = now;
  }
  // Between where scores stay and where the furthest go, P rises.
  float previous = 0;
  for (float s = cap.range; s < 1.31f * cap.raw; s += 0.001f * cap.raw) {
    EXPECT_GT(s * cap.factor(s), previous);
    previous = s * cap.factor(s);
  }
}

// So that a raw score as far above a row's maximum as the slack is in plain scores is no further
// above it when both are capped.
TEST(Softcap, IsNowhereSteeperThanAtZero) {
  const Softcap cap = make_softcap(0.125, 50, 72);
  const auto p = [&](float s) { return double{s} * cap.factor(s); };
  for (float s = 0; s < 1.31f * cap.raw; s += 0.01f * cap.raw)
    EXPECT_LE(p(s + 0.01f * cap.raw) - p(s), 0.01 * cap.raw * cap.a * (1 + 1e-5)) << s;
}

// Scores below the range are not remapped in rows whose other scores outweigh them.
TEST(Softcap, MovesLowScoresWhereTheyMatter) {
  for (const double softcap : {1., 5., 10., 11., 12., 15., 20., 30., 50., 100., 1000.}) {
    const double unit = softcap * std::numbers::log2e;
    const Softcap cap = make_softcap(0.125, softcap, unit);
    EXPECT_TRUE(cap.must_remap_negative(-kInf)) << "no key seen yet";
    EXPECT_TRUE(cap.must_remap_negative(std::nanf("")));
    EXPECT_TRUE(cap.must_remap_negative(static_cast<float>(-unit))) << softcap;
    EXPECT_EQ(cap.must_remap_negative(static_cast<float>(0.2 * unit)), softcap < 24) << softcap;
    for (double shift = -unit; shift < unit; shift += unit / 256) {
      if (cap.must_remap_negative(static_cast<float>(shift))) continue;
      const double bound = softcap < 30 ? 0x1p-28 : 0x1p-32;
      for (double x = 0.5; x < 20; x *= 1.002) {
        const auto s = static_cast<float>(-x * softcap / 0.125);
        const double want = std::exp2(unit * std::tanh(-x) - shift);
        // The second is what P costs any weight.
        ASSERT_NEAR(std::exp2(double{s} * cap.factor(s) - shift), want,
                    bound + want * unit * 0x1p-18)
            << softcap << " " << shift << " at x = " << -x;
      }
      ASSERT_EQ(std::exp2(-kInf * cap.factor(-kInf) - shift), 0);
    }
  }
}

TEST(Softcap, CoefficientsAreNormalNumbersThroughoutTheRange) {
  for (const double softcap : {double{kSmallestSoftcap}, double{kLargestSoftcap}})
    for (const double ratio : {double{kSmallestSoftcap}, double{kLargestSoftcap}})
      for (const double unit : {1.0, softcap * std::numbers::log2e}) {
        const Softcap cap = make_softcap(softcap * ratio, softcap, unit);
        for (const float x : {cap.a, cap.b, cap.c, cap.range, cap.log2_u, cap.raw})
          EXPECT_TRUE(std::isnormal(x)) << softcap << " " << ratio << " " << unit << ": " << x;
      }
}

}  // namespace
}  // namespace flash3::cuda::sm90
