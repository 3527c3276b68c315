// SPDX-License-Identifier: Apache-2.0
// Which weights dropout keeps: Philox against published vectors, the groups of pairs that share its
// numbers, the rules of dropout in calls, and flash3_dropout_mask.
#include "core/dropout.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "flash3/dropout.hpp"

namespace flash3::test {
namespace {

constexpr PhiloxKey kKey{0xa4093822, 0x299f31d0};

// philox4x32 with 7 rounds of Random123's kat_vectors.
TEST(Philox, GivesThePublishedWords) {
  struct Vector {
    PhiloxWords counter;
    PhiloxKey key;
    std::array<unsigned, 4> words;
  };
  constexpr unsigned kOnes = 0xffffffff;
  for (const Vector& v :
       {Vector{{{0, 0, 0, 0}}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
        Vector{{{kOnes, kOnes, kOnes, kOnes}},
               {kOnes, kOnes},
               {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
        Vector{{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
               kKey,
               {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}})
    EXPECT_EQ(std::to_array(philox(v.counter, v.key).word), v.words);
}

TEST(Dropout, KeyIsOfSeedAndOffset) {
  const PhiloxWords words = philox({{3, 4, 0, 0}}, {1, 2});
  const PhiloxKey key = dropout_key(0x2'0000'0001, 0x4'0000'0003);
  EXPECT_EQ(key.low, words.word[0]);
  EXPECT_EQ(key.high, words.word[1]);
}

// Every pair has 16 bits of its own: groups hold eight pairs each, at eight places.
TEST(Dropout, GroupsDivideThePairs) {
  constexpr int kQueries = 64, kKeys = 96;
  std::map<std::pair<unsigned, unsigned>, std::set<int>> places;
  for (int i = 0; i < kQueries; ++i)
    for (int j = 0; j < kKeys; ++j) {
      const DropoutGroup group = DropoutGroup::of(i, j);
      const int place = DropoutGroup::place(i, j);
      EXPECT_TRUE(places[std::pair(group.queries, group.keys)].insert(place).second)
          << i << " " << j;
      // The form that the header's comment gives: I, r, J and c of the group, and which of the two.
      const int r = int(group.queries % 8), c = int(group.keys % 4);
      EXPECT_EQ(i, int(group.queries) / 8 * 16 + r + 8 * (place / 4));
      EXPECT_EQ(j, int(group.keys) / 4 * 16 + 2 * c + place % 2 + 8 * (place / 2 % 2));
      // Kept where these bits are at least the threshold.
      const unsigned word = group.words(7, kKey).word[place / 2];
      const unsigned bits = place % 2 == 0 ? word & 0xffff : word >> 16;
      EXPECT_TRUE(dropout_keeps(kKey, bits, 7, i, j));
      EXPECT_FALSE(dropout_keeps(kKey, bits + 1, 7, i, j));
    }
  EXPECT_EQ(places.size(), size_t{kQueries * kKeys / 8});
  for (const auto& [group, of_group] : places) {
    EXPECT_EQ(of_group, (std::set<int>{0, 1, 2, 3, 4, 5, 6, 7}));
    EXPECT_LT(group.first, unsigned{kQueries / 2});
    EXPECT_LT(group.second, unsigned{kKeys / 4});
  }
}

TEST(Dropout, ThresholdIsRoundedAndBelowAll) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0x1p-18), 0u);
  EXPECT_EQ(dropout_threshold(0x1p-16), 1u);
  EXPECT_EQ(dropout_threshold(0.1), 6554u);
  EXPECT_EQ(dropout_threshold(0.5), 32768u);
  EXPECT_EQ(dropout_threshold(1 - 0x1p-24), 65535u);
  EXPECT_EQ(dropout_scale(0), 1.f);
  EXPECT_EQ(dropout_scale(32768), 2.f);
  EXPECT_EQ(dropout_scale(65535), 65536.f);
}

template <class Params, class Problem>
std::string error_of(Params p) {
  Problem problem;
  return make_problem(&p, Pointers::kRequired, &problem).message();
}

TEST(Dropout, ProbabilityIsCheckedByName) {
  Call call;
  BackwardCall backward;
  for (const auto& [p, text] : {std::pair{1.f, "1"},
                                {-0.1f, "-0.1"},
                                {2.f, "2"},
                                {std::numeric_limits<float>::quiet_NaN(), "nan"}}) {
    const std::string error =
        std::string("dropout_p = ") + text + " but it must be from 0 (none) to below 1";
    flash3_forward_params of_forward = call.args.params();
    flash3_backward_params of_backward = backward.args.params();
    of_forward.dropout_p = of_backward.dropout_p = p;
    EXPECT_EQ((error_of<flash3_forward_params, ForwardProblem>(of_forward)), error);
    EXPECT_EQ((error_of<flash3_backward_params, BackwardProblem>(of_backward)), error);
  }
}

TEST(Dropout, IsRefusedWithWhatItDoesNotGoWith) {
  Call call;
  flash3_forward_params p = call.args.params();
  p.dropout_p = 0.25f;
  const auto error = [&] { return error_of<flash3_forward_params, ForwardProblem>(p); };
  const std::string rule = "; dropout excludes FP8, qv and tree_mask";
  EXPECT_EQ(error(), "");
  p.compute = FLASH3_COMPUTE_FP8;
  EXPECT_EQ(error(), "dropout_p = 0.25 and compute = 1 (fp8)" + rule);
  p.compute = FLASH3_COMPUTE_AS_GIVEN;
  p.qv = p.out;
  EXPECT_EQ(error(), "dropout_p = 0.25 and qv is given" + rule);
  p.qv = {};
  static const uint64_t words[64] = {};
  p.tree_mask = tree_mask_tensor(words, p.q.shape[0], p.q.shape[1]);
  EXPECT_EQ(error(), "dropout_p = 0.25 and tree_mask is given" + rule);
  p.dropout_p = 0;
  EXPECT_EQ(error(), "");
  p.tree_mask = {};
  p.q.dtype = p.k.dtype = p.v.dtype = FLASH3_FLOAT8_E4M3;
  EXPECT_EQ(error(), "");
  p.dropout_p = 0.25f;
  EXPECT_EQ(error(), "dropout_p = 0.25 and q.dtype = float8_e4m3" + rule);
}

TEST(Dropout, ComesFromTheNumbersOrFromTheState) {
  Call call;
  flash3_forward_params p = call.args.params();
  p.dropout_p = 0.1f, p.dropout_seed = 5, p.dropout_offset = uint64_t{1} << 63;
  ForwardProblem problem;
  const auto key = [&] {
    EXPECT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
    const PhiloxKey made = problem.dropout_key();
    return std::pair(made.low, made.high);
  };
  const auto wanted = [](uint64_t seed, uint64_t offset) {
    const PhiloxKey made = dropout_key(seed, offset);
    return std::pair(made.low, made.high);
  };
  EXPECT_EQ(key(), wanted(5, uint64_t{1} << 63));
  EXPECT_EQ(problem.dropout.threshold, 6554u);
  const int64_t state[2] = {-1, 9};
  p.dropout_state = dropout_state_tensor(state);
  EXPECT_EQ(key(), wanted(~uint64_t{0}, 9));
}

// ---- flash3_dropout_mask ----

struct MaskCall {
  static constexpr int64_t kBatch = 2, kHeads = 3, kQueries = 37, kKeys = 53;
  std::vector<uint8_t> kept = std::vector<uint8_t>(kBatch * kHeads * kQueries * kKeys, 7);
  DropoutMask args{.kept = kept_tensor(kept.data(), {kBatch, kHeads, kQueries, kKeys}),
                   .dropout_p = 0.3f,
                   .dropout_seed = 11,
                   .dropout_offset = 12};
};

TEST(DropoutMask, IsTheDefinition) {
  for (const int threads : {1, 3}) {
    MaskCall call;
    call.args.num_threads = threads;
    dropout_mask(call.args);
    size_t at = 0;
    for (unsigned head = 0; head < MaskCall::kBatch * MaskCall::kHeads; ++head)
      for (int i = 0; i < MaskCall::kQueries; ++i)
        for (int j = 0; j < MaskCall::kKeys; ++j)
          ASSERT_EQ(call.kept[at++],
                    dropout_keeps(dropout_key(11, 12), dropout_threshold(0.3f), head, i, j))
              << head << " " << i << " " << j;
  }
}

TEST(DropoutMask, TakesStridesAndAState) {
  MaskCall whole, call;
  dropout_mask(whole.args);
  const int64_t state[2] = {11, 12};
  std::vector<uint8_t> memory(size_t{2} * 3 * 64 * 64, 9);
  call.args.kept = {memory.data(),
                    FLASH3_UINT8,
                    4,
                    {2, 3, MaskCall::kQueries, MaskCall::kKeys},
                    {64, 2 * 64, 6 * 64, 1}};
  call.args.dropout_seed = call.args.dropout_offset = 77;
  call.args.dropout_state = dropout_state_tensor(state);
  dropout_mask(call.args);
  size_t at = 0;
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t h = 0; h < 3; ++h)
      for (int64_t i = 0; i < MaskCall::kQueries; ++i) {
        const uint8_t* const row = &memory[static_cast<size_t>((b + 2 * h + 6 * i) * 64)];
        for (int64_t j = 0; j < 64; ++j)
          ASSERT_EQ(row[j], j < MaskCall::kKeys ? whole.kept[at++] : 9) << b << h << i << " " << j;
      }
}

TEST(DropoutMask, OfNoDropoutKeepsAll) {
  MaskCall call;
  call.args.dropout_p = 0;
  dropout_mask(call.args);
  EXPECT_EQ(call.kept, std::vector<uint8_t>(call.kept.size(), 1));
  call.args.kept = kept_tensor(nullptr, {2, 0, 5, 5});
  dropout_mask(call.args);
}

TEST(DropoutMask, RefusesWhatBreaksARule) {
  const auto error = [](const auto& change) {
    MaskCall call;
    change(call);
    const Result result = try_dropout_mask(call.args);
    EXPECT_EQ(call.kept, std::vector<uint8_t>(call.kept.size(), 7));
    return std::pair(result.code(), result.message());
  };
  const auto invalid = [](const char* text) {
    return std::pair(FLASH3_INVALID_ARGUMENT, std::string(text));
  };
  EXPECT_EQ(error([](MaskCall& c) { c.args.dropout_p = 1; }),
            invalid("dropout_p = 1 but it must be from 0 (none) to below 1"));
  EXPECT_EQ(error([](MaskCall& c) { c.args.kept.dtype = FLASH3_FLOAT32; }),
            invalid("kept.dtype = float32 but it must be uint8"));
  EXPECT_EQ(error([](MaskCall& c) { c.args.kept.ndim = 3; }),
            invalid("kept.ndim = 3 but it must be 4, [batch, heads_q, seq_q, seq_k]"));
  EXPECT_EQ(error([](MaskCall& c) { c.args.kept.data = nullptr; }).second.find("kept.data is null"),
            0u);
  EXPECT_EQ(error([](MaskCall& c) { c.args.kept.stride[1] = 0; }).first, FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(error([](MaskCall& c) { c.args.kept.shape[2] = -1; }).first, FLASH3_INVALID_ARGUMENT);
  static const int64_t state[3] = {};
  EXPECT_EQ(error([](MaskCall& c) {
              c.args.dropout_state = dropout_state_tensor(state);
              c.args.dropout_state.shape[0] = 3;
            }),
            invalid("dropout_state.shape[0] = 3 but it must be 2: a seed and an offset"));
  EXPECT_EQ(error([](MaskCall& c) {
              c.args.dropout_state =
                  dropout_state_tensor(reinterpret_cast<int64_t*>(c.kept.data()));
            }).second.find("kept at "),
            0u);
  EXPECT_EQ(error([](MaskCall& c) { c.args.num_threads = -1; }),
            invalid("num_threads = -1 but it must be at least 0 (0: one per core)"));
  flash3_dropout_mask_params p = MaskCall().args.params();
  p.struct_size = 8;
  EXPECT_EQ(flash3_dropout_mask(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(flash3_dropout_mask(nullptr), FLASH3_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace flash3::test
