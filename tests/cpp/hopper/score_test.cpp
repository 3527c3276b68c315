// SPDX-License-Identifier: Apache-2.0
// The integers of the score stage: which row and key an element is of, and what rows see. Needs no
// GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "cuda/device/score/key_bits.hpp"
#include "cuda/device/score/partial.hpp"
#include "cuda/device/score/softcap.hpp"
#include "cuda/device/score/transposed_views.hpp"
#include "cuda/device/score/view.hpp"
#include "cuda/device/types.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "device/planned_forward.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda {
namespace {

// Line and column, of a 64-line accumulator, of element i of a thread (PTX ISA, wgmma: D fragment).
std::pair<int, int> accumulator_place(int thread, int i) {
  return {thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2};
}

// Which element of scores at(…, r, k) is.
template <class View>
int element_of(int r, int k) {
  typename View::Scores scores{};
  View::at(scores, r, k) = 1.f;
  const float* const flat = reinterpret_cast<const float*>(&scores);
  int found = -1;
  for (int i = 0; i < int(sizeof(scores) / sizeof(float)); ++i)
    if (flat[i] != 0.f) found = i;
  return found;
}

template <class View>
void expect_each_element_once() {
  std::set<int> elements;
  for (int r = 0; r < View::kRows; ++r)
    for (int k = 0; k < View::kKeys; ++k) elements.insert(element_of<View>(r, k));
  EXPECT_EQ(elements.size(), sizeof(typename View::Scores) / sizeof(float));
  EXPECT_EQ(*elements.begin(), 0);
}

TEST(ScoreView, OfQueriesByKeysIsTheAccumulator) {
  using View = QueriesByKeys<64>;
  static_assert(ScoreView<View>);
  expect_each_element_once<View>();
  for (int thread = 0; thread < 128; ++thread) {
    const auto [row, key] = accumulator_place(thread, 0);
    const View view{row, 1000 + key};
    for (int r = 0; r < View::kRows; ++r)
      for (int k = 0; k < View::kKeys; ++k) {
        const int i = element_of<View>(r, k);
        const auto place = accumulator_place(thread, i);
        EXPECT_EQ(std::pair(view.row(r), view.key(k) - 1000), place);
        EXPECT_EQ(View::row_of(i), r);
        EXPECT_EQ(View::key_of(i), k);
      }
  }
}

TEST(ScoreView, OfKeyBlocksIsTheTransposedAccumulatorOfEachBlock) {
  using View = KeyBlocks<2, 16>;
  static_assert(ScoreView<View>);
  expect_each_element_once<View>();
  for (int thread = 0; thread < 128; ++thread) {
    const auto [key, row] = accumulator_place(thread, 0);
    const View view{row, 1000 + key};
    for (int r = 0; r < View::kRows; ++r)
      for (int k = 0; k < View::kKeys; ++k) {
        const int i = element_of<View>(r, k), block = i / 16;
        const auto [line, column] = accumulator_place(thread, i % 16);
        EXPECT_EQ(view.row(r), column);
        EXPECT_EQ(view.key(k) - 1000, 64 * block + line);
        EXPECT_EQ(KeysByQueries<16>::row_of(i % 16), r);
        EXPECT_EQ(KeysByQueries<16>::key_of(i % 16), k % 2);
      }
  }
}

// Both ways to ask a word say what its bits do.
TEST(TreeMask, WordsHideTheKeysWhoseBitsTheyLack) {
  std::mt19937_64 random(7);
  int hidden_keys = 0;
  for (int n = 0; n < 2000; ++n) {
    const unsigned long long word = random();
    const KeyBits shown{unsigned(word), unsigned(word >> 32)};
    const int first_bit = int(random() % 300), first_key = int(random() % 400);
    const unsigned long long hidden = hidden_from(shown, first_bit, first_key);
    for (int offset = 0; offset < 64; ++offset) {
      const int key = first_key + offset, bit = key - first_bit;
      const bool expected = bit >= 0 && bit < 64 && (word >> bit & 1) == 0;
      const KeyBits asked = bits_of_key(key, first_bit);
      EXPECT_EQ((hidden >> offset & 1) != 0, expected) << key << " of " << first_bit;
      EXPECT_EQ(((asked.low & ~shown.low) | (asked.high & ~shown.high)) != 0, expected);
      hidden_keys += expected;
    }
  }
  EXPECT_GT(hidden_keys, 1000);
}

TEST(RowKeys, EndWithTheSequence) {
  const TileMask mask =
      TileMask::make(10, 20, TileMaskRule{.window_right = 0});  // causal, to the bottom right
  for (int row = 0; row < 10; ++row) {
    EXPECT_EQ(keys_of_row<true>(mask, 20, row).end, row + 11);
    EXPECT_EQ(keys_of_row<true>(mask, 15, row).end, std::min(row + 11, 15));
    EXPECT_EQ(keys_of_row<false>(mask, 20, row).end, 20);
  }
}

const auto kExp2 = [](float x) { return std::exp2(x); };
using Row = Partial<1>;

// slack: by how much a lazy maximum may lie below the largest score.
Row partial_of(const std::vector<float>& scores, const std::vector<float>& values, size_t begin,
               size_t end, float slack) {
  Row p;
  for (size_t j = begin; j < end; ++j) p.max = std::max(p.max, scores[j] - slack);
  for (size_t j = begin; j < end; ++j) {
    const float weight = std::exp2(scores[j] - merge_origin(p.max));
    p.sum += weight, p.out[0] += weight * values[j];
  }
  return p;
}

// Wherever the keys are parted, and whatever each part counts from.
TEST(Partial, MergedAreOfAllKeys) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> score(0.f, 20.f), value(0.f, 1.f);
  for (int n = 0; n < 500; ++n) {
    const size_t keys = 1 + random() % 40;
    std::vector<float> scores(keys), values(keys);
    for (float& s : scores) s = random() % 5 == 0 ? -INFINITY : score(random);
    for (float& v : values) v = value(random);
    const Row all = partial_of(scores, values, 0, keys, 0.f);
    Row merged;
    for (size_t begin = 0; begin < keys;) {
      const size_t end = std::min(keys, begin + 1 + random() % 9);
      merged.merge(partial_of(scores, values, begin, end, float(random() % 9)), kExp2);
      begin = end;
    }
    const float scale = std::exp2(merged.max - all.max);  // of weights
    if (all.sum == 0.f) {
      EXPECT_EQ(merged.max, -INFINITY);
      EXPECT_EQ(merged.sum, 0.f);
      EXPECT_EQ(merged.out[0], 0.f);
      continue;
    }
    EXPECT_NEAR(merged.sum * scale, all.sum, 1e-5f * all.sum);
    EXPECT_NEAR(merged.out[0] * scale, all.out[0], 1e-5f * all.sum * 4);
  }
}

TEST(Partial, WithoutAKeyChangesNothing) {
  for (const bool first : {false, true}) {
    const Row some{{-0.7f}, 3.f, 1.5f};
    Row merged = first ? Row{} : some;
    merged.merge(first ? some : Row{}, kExp2);
    EXPECT_EQ(merged.max, some.max);
    EXPECT_EQ(merged.sum, some.sum);
    EXPECT_EQ(merged.out[0], some.out[0]);
  }
  Row none;
  none.merge(Row{}, kExp2);
  EXPECT_EQ(none.max, -INFINITY);
  EXPECT_EQ(none.sum, 0.f);
}

}  // namespace
}  // namespace flash3::cuda

namespace flash3::cuda::sm90 {
namespace {

// The arithmetic of soft-capped scores, as the kernels have it: against tanh in double precision.

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

// What the Hopper backend plans for calls with a softcap: which kernels, and which softcaps it
// leaves to others. Needs no GPU: a plan launches nothing.

Status plan_of(const std::string& id, PlannedForward* plan) {
  return cuda::sm90::plan(problem_of(id), kDevice, plan);
}

Status plan_of(const std::string& id, BackwardPlan* plan) {
  const auto params = cases::make_backward_question(cases::parsed(id + "/bwd"));
  BackwardProblem problem;
  EXPECT_TRUE(make_backward_problem(&params, Pointers::kOptional, &problem).ok()) << id;
  size_t workspace = 0;
  return cuda::sm90::plan(problem, kDevice, &workspace, plan);
}

// The kernel id of the plan; its end says the tile.
template <class Plan>
std::string kernel_of(const std::string& id) {
  Plan plan;
  const Status status = plan_of(id, &plan);
  EXPECT_TRUE(status.ok()) << id << ": " << status.message();
  return plan.kernel ? plan.kernel->id : "";
}

constexpr const char* kMasks[] = {"full", "causal", "w100:50", "causal/chunk64"};

// The next larger head dim that has one, under any mask, ragged or not.
TEST(SoftcapPlan, TakesTheKernelOfTheSoftcap) {
  for (const std::string dtype : {"fp16", "bf16"})
    for (const char* mask : kMasks)
      for (const char* ragged : {"", "/packed"})
        for (const auto& [dims, kernel_dim, backward] : {std::tuple{"1", "64", "96x128"},
                                                         {"64", "64", "96x128"},
                                                         {"33x64", "64", "96x128"},
                                                         {"65", "128", "64x128"},
                                                         {"64x65", "128", "64x128"},
                                                         {"128x1", "128", "64x128"},
                                                         {"129", "256", "64x64"},
                                                         {"192x128", "256", "64x64"},
                                                         {"256", "256", "64x64"}}) {
          const std::string id =
              dtype + "/b1/q300/k300/h2/d" + dims + "/" + mask + "/softcap30" + ragged;
          const std::string name = dtype + "_d" + kernel_dim + "_softcap_";
          EXPECT_EQ(kernel_of<PlannedForward>(id).find("fwd_" + name), 0u) << id;
          EXPECT_EQ(kernel_of<BackwardPlan>(id), "bwd_" + name + backward) << id;
        }
}

TEST(SoftcapPlan, TakesTheTileOfTheLength) {
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b1/q16384/k16384/h32/d64/causal/softcap50"),
            "fwd_bf16_d64_softcap_192x128");
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b16/q1024/k1024/h32/d64/causal/softcap50"),
            "fwd_bf16_d64_softcap_256x64");
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b16/q1024/k1024/h16/d128/full/softcap50"),
            "fwd_bf16_d128_softcap_128x128");
  EXPECT_EQ(kernel_of<PlannedForward>("bf16/b16/q1024/k1024/h16/d128/full"),
            "fwd_bf16_d128_full_128x128");
  EXPECT_EQ(kernel_of<BackwardPlan>("bf16/b1/q8192/k100/h2/d128/full/softcap30"),
            "bwd_bf16_d128_softcap_80x128");
}

// Short sequences share the tiles of softcap kernels too, and never those of another kind.
TEST(SoftcapPlan, ShortSequencesShareTiles) {
  for (const char* dims : {"64", "96", "128", "192x128", "256"})
    for (const char* mask : kMasks)
      for (const char* softcap : {"", "/softcap30"}) {
        const std::string id =
            std::string("bf16/b1000/q16/k16/h8x2/d") + dims + "/" + mask + "/packed" + softcap;
        const ForwardProblem problem = problem_of(id);
        int with_slots = 0;
        for (const ForwardChoice& choice : forward_choices(problem)) {
          EXPECT_EQ(choice.kernel->config.score == ScoreKind::kSoftcap, softcap[0] != '\0') << id;
          with_slots += choice.slot_rows == 16;
        }
        EXPECT_EQ(with_slots, 1) << id;
        PlannedForward plan;
        ASSERT_TRUE(cuda::sm90::plan(problem, kDevice, &plan).ok()) << id;
        EXPECT_EQ(plan.slot_rows, 16) << id;
      }
}

// The cap's coefficients are normal numbers for softcaps within these bounds alone.
TEST(SoftcapPlan, SaysWhichSoftcapsItDoesNotCompute) {
  const auto refusal = [](const std::string& option) {
    const std::string id = "bf16/b2/q64/k64/h2/d64/full/" + option;
    PlannedForward forward;
    BackwardPlan backward;
    const Status status = plan_of(id, &forward);
    EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED) << option;
    EXPECT_EQ(plan_of(id, &backward).message(), status.message());
    return status.message();
  };
  EXPECT_EQ(refusal("softcap1e7"),
            "softcap = 1e+07 with softmax_scale = 0.125 but the hopper backend takes softcap and "
            "softmax_scale / softcap from 1e-06 to 1e+06");
  EXPECT_EQ(refusal("softcap1e-7").substr(0, 15), "softcap = 1e-07");
  EXPECT_EQ(refusal("softcap1e5/scale0.01").substr(0, 44),
            "softcap = 1e+05 with softmax_scale = 0.01 bu");
}

}  // namespace
}  // namespace flash3::cuda::sm90
