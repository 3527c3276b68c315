// SPDX-License-Identifier: Apache-2.0
// What the case table covers, and the inputs of cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "../parsed.hpp"
#include "cases/added_tensors.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/cache_tensors.hpp"
#include "cases/check.hpp"
#include "cases/mask.hpp"
#include "cases/runner.hpp"
#include "cases/sequences.hpp"
#include "cases/table.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {
namespace {

TEST(CaseTable, Fp8CasesReadBackAndAreMixed) {
  for (const bool ragged : {false, true}) {
    std::set<Scales> scales;
    std::set<flash3_dtype> outs;
    std::set<bool> computed;
    for (const Case& c : fp8_case_table(Level::kQuick, ragged)) {
      EXPECT_TRUE(parsed(to_id(c)) == c) << to_id(c);
      EXPECT_EQ(c.is_ragged(), ragged) << to_id(c);
      EXPECT_TRUE(c.fp8 != (c.dtype == FLASH3_FLOAT8_E4M3)) << to_id(c);
      scales.insert(c.scales);
      outs.insert(c.dtype_of_out());
      computed.insert(c.fp8);
    }
    EXPECT_EQ(scales.size(), 4u);
    EXPECT_EQ(outs.size(), 3u);
    EXPECT_EQ(computed.size(), 2u);
  }
  std::set<std::tuple<Scales, bool, Rotary>> kinds;
  for (const Case& c : quantize_case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU))) {
    EXPECT_TRUE(parsed(to_id(c)) == c && c.quantize) << to_id(c);
    kinds.insert({c.scales, c.rotate, c.rotary});
  }
  EXPECT_GE(kinds.size(), 15u);
}

TEST(CaseTable, MaskCasesReadBackAndAreMixed) {
  std::set<std::string> masks;
  for (const bool backward : {false, true})
    for (const Case& of : mask_case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU), backward)) {
      EXPECT_TRUE(parsed(to_id(of)) == of && of.mask.given() && of.backward == backward)
          << to_id(of);
      masks.insert(to_text(of.mask));
    }
  EXPECT_EQ(masks.size(),
            1u + 2u + 10u * 4u);  // documents have no heads, and a band nothing of its own
}

TEST(CaseTable, CacheCasesReadBackAndAreMixed) {
  const Case c = parsed(
      "bf16/b9/q1/k300/h8x2/d128/causal/random/paged16/leftpad/append3/packednew/rotary/offsets");
  EXPECT_TRUE(c.has_cache() && c.used_k && c.page_size == 16 && c.leftpad && c.append == 3 &&
              c.append_packed && c.rotary == Rotary::kHalves && c.rotary_offsets);
  EXPECT_FALSE(parsed("bf16/b1/q1/k9/h1/d8/full/packed/append1").packed_k);
  EXPECT_TRUE(parsed("bf16/b1/q1/k9/h1/d8/full/batchidx").batch_idx);

  std::set<int64_t> page_sizes, appends;
  std::set<std::tuple<bool, bool, bool, bool, Rotary>> kinds;
  std::set<std::tuple<flash3_dtype, bool, Scales, flash3_dtype>> fp8;
  for (const Level level : {Level::kQuick, Level::kFull})
    for (const Case& one : cache_case_table(level, dtypes_of(FLASH3_BACKEND_CPU))) {
      EXPECT_TRUE(parsed(to_id(one)) == one &&
                  (one.reads_cache() || one.kv8 || one.tree || one.latent || one.qv))
          << to_id(one);
      if (one.dtype_of_kv() == FLASH3_FLOAT8_E4M3)
        fp8.insert({one.dtype, one.has_cache(), one.scales,
                    one.append > 0 ? one.dtype_of_new() : FLASH3_DTYPE_NONE});
      page_sizes.insert(one.page_size), appends.insert(one.append);
      kinds.insert({one.batch_idx, one.leftpad, one.append_packed, one.packed_q, one.rotary});
    }
  EXPECT_EQ(page_sizes.size(), 9u);
  EXPECT_EQ(appends.size(), 11u);
  EXPECT_GE(kinds.size(), 20u);
  EXPECT_GE(fp8.size(), 40u);  // of 48 with a cache and of 16-bit q without
  const Case kv8 = parsed("bf16/b9/q1/k300/h8x2/d128/causal/paged16/append3/newe4m3/kv8/onescale");
  EXPECT_EQ(kv8.dtype_of_kv(), FLASH3_FLOAT8_E4M3);
  EXPECT_EQ(kv8.dtype_of_new(), FLASH3_FLOAT8_E4M3);
  EXPECT_EQ(kv8.dtype_of_out(), FLASH3_BFLOAT16);
  EXPECT_EQ(kv8.scales_of(TensorName::kQ), Scales::kNone);
  EXPECT_EQ(kv8.scales_of(TensorName::kV), Scales::kTensor);
}

// In each shape, over all that it may go with.
TEST(CaseTable, AddedTensorsGoWithEveryKindOfCall) {
  const auto dtypes = dtypes_of(FLASH3_BACKEND_CPU);
  std::map<std::string, std::map<std::string_view, std::set<int64_t>>> seen;  // by kind and name
  for (const auto& table :
       {case_table(Level::kQuick, dtypes), ragged_case_table(Level::kQuick, dtypes),
        cache_case_table(Level::kQuick, dtypes)}) {
    const std::vector<Case> with = with_added_tensors(table, FLASH3_BACKEND_CPU);
    EXPECT_GT(with.size(), table.size() + table.size() / 20);
    EXPECT_TRUE(std::equal(table.begin(), table.end(), with.begin()));
    for (size_t i = table.size(); i < with.size(); ++i) {
      const Case& c = with[i];
      EXPECT_TRUE(parsed(to_id(c)) == c) << to_id(c);
      AddedOptions::visit(c.added, [&](const ParamField& field, int64_t shape) {
        if (field.kind != FieldKind::kTensor || shape == 0) return;
        const auto note = [&](const char* kind) { seen[kind][field.name].insert(shape); };
        note(c.has_cache() ? "cache" : c.is_ragged() ? "ragged" : "dense");
        if (c.softcap > 0) note("softcap");
        if (c.window) note("window");
        if (c.sink != Sink::kNone) note("sink");
        if (c.latent || c.qv) note("latent");
        if (c.tree) note("tree");
      });
      EXPECT_TRUE(takes_added_tensors(FLASH3_BACKEND_CPU, c));
    }
    for (const Case& c : with_added_tensors(table, FLASH3_BACKEND_HOPPER))
      EXPECT_TRUE(takes_added_tensors(FLASH3_BACKEND_HOPPER, c)) << to_id(c);
  }
  const std::map<std::string, Case> limited = {
      {"tree", parsed("bf16/b2/q9/k17/h4x2/d24/full/tree")},
      {"cache", parsed("bf16/b2/q9/k17/h4x2/d24/full/paged16")},
      {"latent", parsed("bf16/b2/q9/k17/h4x1/d40x24/full/paged16/qv")}};
  for (const ParamField& field : added_fields<flash3_forward_params>())
    for (auto& [kind, names] : seen) {
      const auto of = limited.find(kind);
      if (field.kind != FieldKind::kTensor ||
          (of != limited.end() && !goes_with(of->second, field)))
        continue;
      EXPECT_EQ(names[field.name].size(), size_t(count_values(field) - 1)) << kind << field.name;
    }
  EXPECT_EQ(seen.size(), 8u);
}

// Which is all on the CPU, and on Hopper what depends on the distance alone.
TEST(CaseTable, AddedTensorsOfFp8AreThoseThatItsKernelsTake) {
  for (const flash3_backend backend : {FLASH3_BACKEND_CPU, FLASH3_BACKEND_HOPPER}) {
    std::set<std::string_view> given;
    for (const auto& table :
         {fp8_case_table(Level::kQuick, false), fp8_case_table(Level::kQuick, true),
          cache_case_table(Level::kQuick, dtypes_of(backend))}) {
      const std::vector<Case> with = with_added_tensors(table, backend);
      for (size_t i = table.size(); i < with.size(); ++i) {
        const Case& c = with[i];
        if (!c.fp8 && c.dtype_of_kv() != FLASH3_FLOAT8_E4M3) continue;
        AddedOptions::visit(c.added, [&](const ParamField& field, int64_t value) {
          if (field.kind == FieldKind::kTensor && value != 0) given.insert(field.name);
        });
        const bool widens = !c.fp8 && c.dtype != FLASH3_FLOAT8_E4M3;
        EXPECT_TRUE(backend == FLASH3_BACKEND_CPU || !widens) << to_id(c);
      }
    }
    std::set<std::string_view> expected{"alibi_slopes", "bias_table"};
    if (backend == FLASH3_BACKEND_CPU) expected.insert({"bias", "max_logits"});
    EXPECT_EQ(given, expected);
  }
}

// Rows that hold no key have the fill pattern before the call, those that it writes too.
TEST(CacheCase, RowsWithoutAKeyHoldTheFillPattern) {
  HostMemory memory;
  const Case c = parsed("fp32/b3/q2/k40/h2/d16/causal/random/paged16/append2/packednew/rotary");
  EXPECT_EQ(run_case(c, memory, {}).failure, "");
  const CacheTensors t = make_cache_tensors(c);
  const flash3_forward_params p = make_cache_params(c, t);
  ForwardProblem problem;
  const Status status = make_forward_problem(&p, Pointers::kRequired, &problem);
  ASSERT_TRUE(status.ok()) << status.message();
  int64_t keys = 0, filled = 0;
  for (int64_t b = 0; b < c.batch; ++b) keys += problem.keys_in_cache(b).cached;
  for_each_row(t.call.k.view, [&](int64_t row) {
    const auto* values = static_cast<const float*>(t.call.k.view.data) + row;
    filled += std::isnan(values[0]) && std::isnan(values[c.head_dim - 1]);
  });
  const int64_t rows = t.call.k.view.shape[0] * t.call.k.view.shape[1];
  EXPECT_EQ(filled, (rows - keys) * c.heads_k);
  EXPECT_GT(keys, 0);
}

TEST(CaseTable, RaggedCasesReadBackAndAreMixed) {
  const auto dtypes = dtypes_of(FLASH3_BACKEND_CPU);
  std::set<std::tuple<bool, bool, bool, bool>> packings;
  std::set<std::pair<Sink, bool>> scores;
  std::set<bool> chunks;
  for (const Case& c : ragged_case_table(Level::kQuick, dtypes)) {
    EXPECT_TRUE(parsed(to_id(c)) == c) << to_id(c);
    EXPECT_TRUE(c.is_ragged()) << to_id(c);
    packings.insert({c.packed_q, c.packed_k, c.used_q, c.used_k});
    scores.insert({c.sink, c.softcap > 0});
    chunks.insert(c.chunk > 0);
  }
  EXPECT_EQ(packings.size(), 10u);
  EXPECT_EQ(scores.size(), 5u);
  EXPECT_EQ(chunks.size(), 2u);
  for (const Case& c : ragged_backward_case_table(Level::kQuick, dtypes))
    EXPECT_TRUE(parsed(to_id(c)) == c && c.backward && c.want_lse) << to_id(c);
}

TEST(CaseTable, BackwardCasesReadBackAndAreMixed) {
  std::set<std::string> ids;
  std::set<std::pair<bool, bool>> options;
  std::set<int64_t> dims;
  for (const Case& c : backward_case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU))) {
    EXPECT_TRUE(parsed(to_id(c)) == c) << to_id(c);
    EXPECT_TRUE(ids.insert(to_id(c)).second) << to_id(c) << " is there twice";
    EXPECT_TRUE(c.backward && c.want_lse) << to_id(c);
    EXPECT_TRUE(c.distribution != Distribution::kSpecial || (!c.causal && !c.window)) << to_id(c);
    options.insert({c.want_dlse, c.deterministic});
    dims.insert(c.head_dim);
  }
  EXPECT_EQ(options.size(), 4u);
  std::set<int64_t> forward_dims;
  for (const Case& c : case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU)))
    forward_dims.insert(c.head_dim);
  EXPECT_EQ(dims, forward_dims);
}

TEST(CaseTable, FullLevelHasEveryPairOfLengthsAndEveryHeadDim) {
  const std::set<int64_t> lengths{0, 1, 63, 64, 65, 127, 128, 129, 1000, 4097};
  std::set<std::tuple<int64_t, int64_t, bool>> pairs;
  std::set<std::pair<int64_t, flash3_dtype>> dims;
  for (const Case& c : case_table(Level::kFull, dtypes_of(FLASH3_BACKEND_HOPPER))) {
    EXPECT_NE(c.dtype, FLASH3_FLOAT32);
    if (c.head_dim == 64 && !c.window) pairs.insert({c.seq_q, c.seq_k, c.causal});
    dims.insert({c.head_dim, c.dtype});
  }
  for (const int64_t q : lengths)
    for (const int64_t k : lengths)
      for (const bool causal : {false, true})
        EXPECT_TRUE(pairs.contains({q, k, causal})) << q << " " << k << " " << causal;
  for (const int64_t dim : {8,   16,  32,  40, 64, 72, 80, 96,  104, 128, 160,
                            192, 224, 256, 1,  3,  33, 65, 100, 127, 129, 255})
    for (const flash3_dtype dtype : dtypes_of(FLASH3_BACKEND_HOPPER))
      EXPECT_TRUE(dims.contains({dim, dtype})) << dim;
}

TEST(Pairwise, EveryTwoLevelsMeet) {
  const std::vector<int> sizes{7, 2, 5, 3, 4};
  const auto rows = pairwise(sizes);
  EXPECT_LT(rows.size(), 60u);  // 35 at least, 840 in the full product
  for (size_t f = 0; f < sizes.size(); ++f)
    for (size_t g = f + 1; g < sizes.size(); ++g)
      for (int i = 0; i < sizes[f]; ++i)
        for (int j = 0; j < sizes[g]; ++j)
          EXPECT_TRUE(
              std::any_of(rows.begin(), rows.end(),
                          [&](const std::vector<int>& row) { return row[f] == i && row[g] == j; }))
              << f << ":" << i << " " << g << ":" << j;
}

TEST(Inputs, TheLayoutDoesNotChangeTheValues) {
  const auto plain = make_tensor(FLASH3_FLOAT32, 2, 3, 2, 5, Layout::kBatchSeq);
  fill_random(plain.view, Distribution::kOutliers, 7);
  for (const Layout layout : {Layout::kHeadsFirst, Layout::kPadded, Layout::kOdd}) {
    const auto other = make_tensor(FLASH3_FLOAT32, 2, 3, 2, 5, layout);
    fill_random(other.view, Distribution::kOutliers, 7);
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t s = 0; s < 3; ++s)
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t d = 0; d < 5; ++d) {
            const auto at = [&](const flash3_tensor& t) {
              return static_cast<const float*>(
                  t.data)[b * t.stride[0] + s * t.stride[1] + h * t.stride[2] + d];
            };
            EXPECT_EQ(at(plain.view), at(other.view)) << short_name(layout);
          }
    EXPECT_EQ(other.damage(), "") << short_name(layout);
  }
}

// A backward case reads what the forward case of the same name reads, and out and lse of it.
TEST(Inputs, OfABackwardCaseAreThoseOfTheForward) {
  const Case c = parsed("bf16/b2/q9/k17/h4x2/d24/causal/odd/bwd/dlse");
  const BackwardTensors backward = make_backward_tensors(c);
  const ForwardTensors forward = make_forward_tensors(c);
  EXPECT_EQ(backward.q.bytes, forward.q.bytes);
  EXPECT_EQ(backward.k.bytes, forward.k.bytes);
  EXPECT_EQ(backward.v.bytes, forward.v.bytes);
  EXPECT_EQ(backward.dq.bytes, std::vector(forward.q.bytes.size(), std::byte{0xFF}));

  const auto params = make_params(c, forward.q.view, forward.k.view, forward.v.view,
                                  forward.out.view, forward.lse.view);
  ForwardProblem problem;
  ASSERT_TRUE(make_forward_problem(&params, Pointers::kRequired, &problem).ok());
  const ReferenceForward ref = attention_ref(problem);
  EXPECT_EQ(check_out(backward.out.view, ref).failure, "");
  EXPECT_EQ(check_lse(backward.lse.view, ref).failure, "");
  for (const GuardedTensor* t : {&backward.out, &backward.lse, &backward.dout, &backward.dlse})
    EXPECT_EQ(t->damage(), "");
  const auto* dlse = static_cast<const float*>(backward.dlse.view.data);
  EXPECT_TRUE(std::isfinite(dlse[0]));
  EXPECT_NE(dlse[0], dlse[1]);

  const auto question = make_backward_question(c);
  EXPECT_EQ(question.dlse.shape[2], 9);
  EXPECT_EQ(question.dk.stride[1], question.k.stride[1]);
  EXPECT_EQ(question.dk.data, nullptr);
}

TEST(Inputs, AreStandardNormal) {
  constexpr int64_t kCount = 1 << 20;
  std::vector<float> values(kCount);
  fill_normal(values.data(), FLASH3_FLOAT32, kCount, 3);
  double sum = 0, squares = 0, fourths = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double x = values[size_t(i)];
    sum += x, squares += x * x, fourths += x * x * x * x;
  }
  for (int64_t i = 0; i < kCount; i += 100'003)
    EXPECT_EQ(values[size_t(i)], normal_value(3, uint64_t(i)));
  EXPECT_NEAR(sum / kCount, 0, 0.005);
  EXPECT_NEAR(squares / kCount, 1, 0.01);
  EXPECT_NEAR(fourths / kCount, 3, 0.05);
}

}  // namespace
}  // namespace flash3::cases
