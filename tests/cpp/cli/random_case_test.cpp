// SPDX-License-Identifier: Apache-2.0
// The generator of random problems: what it draws, that it draws the same again, and that every
// problem is a valid call.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <tuple>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/check.hpp"
#include "cases/checked_call.hpp"
#include "cases/mask.hpp"
#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {
namespace {

constexpr uint64_t kDraws = 20'000;

TEST(RandomCase, IsNamedByItsIdAndDrawnAgain) {
  std::set<std::string> ids;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const Case c = random_case(7, i);
    const std::string id = to_id(c);
    ASSERT_TRUE(parsed(id) == c) << id;
    ASSERT_TRUE(random_case(7, i) == c) << id;
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), kDraws);
  EXPECT_FALSE(random_case(8, 0) == random_case(7, 0));
}

// What no change of the generator may leave unsaid: the ids of an old log mean nothing otherwise.
TEST(RandomCase, IsTheSameOnEveryMachine) {
  EXPECT_EQ(to_id(random_case(1, 0)),
            "bf16/b23/q38/k53/h4/d72/causal/seed650692/empty/packedk/usedq/max_logits=heads/"
            "bias_table=d/outbf16/fp8");
  EXPECT_EQ(
      to_id(random_case(1, 1000)),
      "bf16/b6/q603/k2/h5x1/d64x45/full/padded/outliers/seed747788/edges/packed/mask_alignment=1/"
      "bias=bhk/bwd/dadded");
}

TEST(RandomCase, CoversEveryOption) {
  std::set<std::tuple<bool, bool, flash3_dtype>> kinds;
  std::set<flash3_dtype> fp8_outs;
  std::set<std::pair<bool, bool>> fp8, latent;
  std::set<int64_t> dims, dims_v, lengths, ratios, batches, heads;
  std::set<std::tuple<bool, bool, bool, bool>> packings, masks;
  std::set<std::pair<bool, Lengths>> ragged;
  std::set<std::pair<bool, Sink>> sinks;
  std::set<std::pair<bool, Distribution>> distributions;
  std::set<Layout> layouts;
  std::set<std::tuple<TensorName, bool, bool, bool, bool>> own;
  std::set<std::pair<int, Scales>> scales;
  std::set<std::tuple<bool, bool, bool>> gradients, left_out;
  std::set<std::pair<bool, Rotary>> rotations;
  std::set<std::tuple<bool, bool, bool, bool, bool, bool>> flags;
  std::set<int> sums;
  std::set<std::tuple<bool, bool, float>> dropouts;  // of backward cases, with a state
  std::set<std::pair<bool, bool>> filled;            // of backward cases, and of those on a cache
  std::set<std::tuple<int64_t, bool, bool, bool>> logits;  // on a cache, of FP8 keys, with qv
  int64_t with_logits = 0, forward = 0;
  int64_t quick = 0, long_fp8 = 0, shared_keys = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const Case c = random_case(3, i);
    kinds.insert({c.backward, c.quantize, c.dtype});
    if (c.dtype == FLASH3_FLOAT8_E4M3 || c.fp8) fp8_outs.insert(c.dtype_of_out());
    dims.insert(c.head_dim), dims_v.insert(c.head_dim_v), lengths.insert({c.seq_q, c.seq_k});
    batches.insert(c.batch), heads.insert(c.heads_q);
    if (c.heads_k > 0) ratios.insert(c.heads_q / c.heads_k);
    packings.insert({c.packed_q, c.packed_k, c.used_q, c.used_k});
    ragged.insert({c.backward, c.lengths});
    masks.insert(
        {c.causal, c.window && c.window_left >= 0, c.window && c.window_right >= 0, c.chunk > 0});
    sinks.insert({c.backward, c.sink});
    distributions.insert({c.backward, c.distribution});
    layouts.insert(c.layout);
    for (size_t t = 0; t < kTensorNames; ++t)
      if (const auto& l = c.own_layouts[t])
        own.insert({static_cast<TensorName>(t), l->one_batch, l->one_row, l->one_head, l->wild});
    for (const TensorName name : {TensorName::kQ, TensorName::kK, TensorName::kV})
      if (c.dtype == FLASH3_FLOAT8_E4M3 || c.quantize)
        scales.insert({int(name) + 3 * c.quantize, c.scales_of(name)});
    if (c.backward) gradients.insert({c.want_dlse, c.deterministic, c.want_dsink});
    if (c.quantize) left_out.insert({c.left_out[0], c.left_out[1], c.left_out[2]});
    if (c.quantize) rotations.insert({c.rotate, c.rotary});
    latent.insert({c.latent, c.qv});
    if (c.fill) filled.insert({c.backward, c.has_cache()});
    const int64_t of_logits = c.added["max_logits"];
    const bool has_fp8_keys = c.fp8 || c.dtype_of_kv() == FLASH3_FLOAT8_E4M3;
    if (of_logits != 0) logits.insert({of_logits, c.has_cache(), has_fp8_keys, c.qv});
    EXPECT_TRUE(of_logits == 0 || (!c.backward && !c.quantize)) << to_id(c);
    with_logits += of_logits != 0, forward += !c.backward && !c.quantize;
    flags.insert({c.want_lse, c.max_known, c.front > 0, c.softcap > 0, c.softmax_scale > 0, c.fp8});
    sums.insert(c.sums);
    if (c.dropout > 0) dropouts.insert({c.backward, c.added["dropout_state"] != 0, c.dropout});
    quick += flops(c) < 1e7;
    long_fp8 += (c.fp8 || c.dtype == FLASH3_FLOAT8_E4M3) && c.seq_k > 2048 && !c.window;
    shared_keys += c.has_cache() && c.seq_q > 16 && c.seq_k >= 7168 && !c.kv8;
  }
  EXPECT_EQ(kinds.size(), 4u + 3 + 3);
  EXPECT_EQ(fp8_outs.size(), 3u);
  EXPECT_EQ(dims.size(), 256u + 1);  // and 576, of latent attention
  EXPECT_EQ(dims_v.size(), 256u + 1);
  EXPECT_EQ(latent.size(), 3u);
  EXPECT_EQ(sums.size(), 3u);
  EXPECT_EQ(dropouts.size(), 2u * 2 * 6);
  for (const int64_t tile : {64, 80, 96, 112, 128, 144, 192, 256})
    for (const int64_t length : {0, 1, 2}) {
      EXPECT_TRUE(lengths.contains(length));
      EXPECT_TRUE(lengths.contains(tile + length - 1)) << tile + length - 1;
      EXPECT_TRUE(lengths.contains(2 * tile + length - 1)) << 2 * tile + length - 1;
    }
  EXPECT_GT(*lengths.rbegin(), 1500);
  for (const int64_t ratio : {0, 1, 2, 3, 4, 8, 16, 64, 128}) EXPECT_TRUE(ratios.contains(ratio));
  for (const int64_t batch : {0, 1, 2, 3, 100}) EXPECT_TRUE(batches.contains(batch)) << batch;
  EXPECT_EQ(packings.size(), 16u);
  EXPECT_EQ(ragged.size(), 2u * 6);
  EXPECT_EQ(masks.size(), 16u);
  EXPECT_EQ(sinks.size(), 2u * 3);
  EXPECT_EQ(distributions.size(), 2u * 3);
  EXPECT_EQ(layouts.size(), 4u);
  const auto has_own = [&](TensorName name, auto member) {
    return std::any_of(own.begin(), own.end(),
                       [&](const auto& o) { return std::get<0>(o) == name && member(o); });
  };
  for (size_t t = 0; t < kTensorNames; ++t) {
    const auto name = static_cast<TensorName>(t);
    EXPECT_TRUE(has_own(name, [](const auto& o) { return std::get<4>(o); })) << t;
    const bool is_input = name <= TensorName::kV || name == TensorName::kDout;
    EXPECT_EQ(has_own(name, [](const auto& o) { return std::get<1>(o); }),
              is_input || name == TensorName::kDlse);
    EXPECT_EQ(has_own(name, [](const auto& o) { return std::get<2>(o); }), is_input) << t;
    EXPECT_EQ(has_own(name, [](const auto& o) { return std::get<3>(o); }),
              is_input || name == TensorName::kDlse);
  }
  EXPECT_EQ(scales.size(), 3u * 4 + 3 * 3);
  EXPECT_EQ(gradients.size(), 8u);
  EXPECT_EQ(left_out.size(), 7u);
  EXPECT_EQ(rotations.size(), 6u);
  EXPECT_GT(flags.size(), 30u);
  EXPECT_EQ(filled.size(), 3u);
  EXPECT_EQ(logits.size(), 2u * 2 * 3);  // qv has no FP8 keys
  EXPECT_GT(with_logits, forward / 5);
  EXPECT_GT(quick, int64_t(kDraws) / 2);
  EXPECT_GT(long_fp8, int64_t(kDraws) / 500);
  EXPECT_GT(shared_keys, int64_t(kDraws) / 1000);
}

TEST(RandomCase, MasksMeetAllLengths) {
  std::set<std::tuple<CaseMaskSource, bool, bool, bool, bool>> masks;
  std::set<std::tuple<CaseMaskSource, bool, bool>> without_max;  // of those that are packed
  std::set<std::pair<CaseMaskSource, bool>> cached;              // in pages or not
  for (uint64_t i = 0; i < 4 * kDraws; ++i) {
    const Case c = random_case(3, i);
    if (!c.mask.given()) continue;
    masks.insert({c.mask.source, c.packed_q, c.packed_k, c.used_q, c.used_k});
    if (c.has_cache()) cached.insert({c.mask.source, c.page_size > 0});
    if (!c.max_known && (c.packed_q || c.packed_k))
      without_max.insert({c.mask.source, c.packed_q, c.packed_k});
  }
  EXPECT_EQ(masks.size(), 7u * 16);
  EXPECT_EQ(without_max.size(), 7u * 3);
  EXPECT_EQ(cached.size(), 7u * 2);
}

// Asked without data, as a user may ask.
void expect_valid(const Case& c) {
  const auto supported_on_cpu = [](auto params) {
    params.backend = FLASH3_BACKEND_CPU;
    return supported(params);
  };
  const flash3_status status = c.backward   ? supported_on_cpu(make_backward_question(c))
                               : c.quantize ? supported_on_cpu(make_quantize_question(c))
                                            : supported_on_cpu(make_question(c));
  EXPECT_EQ(status, FLASH3_OK) << to_id(c) << "\n" << flash3_last_error();
}

TEST(RandomCase, IsAValidCall) {
  for (uint64_t i = 0; i < 3'000; ++i) expect_valid(random_case(5, i));
  // Of a sequence without keys max_seqlen_k is 0, which says nothing.
  for (const char* end : {"bias=bk", "bias=bhqk/bwd/dadded"})
    expect_valid(parsed(std::string("bf16/b1/q4/k0/h1/d136/full/seed85934/packed/usedk/") + end));
}

TEST(RandomCase, HasTheSameBytesWhenItIsRepeatedByItsId) {
  int64_t compared = 0;
  for (uint64_t i = 0; compared < 60; ++i) {
    const Case c = random_case(9, i);
    if (c.quantize || c.batch * c.heads_q == 0 || flops(c) > 3e6) continue;
    ++compared;
    if (c.backward) {
      const BackwardTensors a = make_backward_tensors(c),
                            b = make_backward_tensors(parsed(to_id(c)));
      EXPECT_TRUE(a.q.bytes == b.q.bytes && a.k.bytes == b.k.bytes && a.v.bytes == b.v.bytes &&
                  a.out.bytes == b.out.bytes && a.lse.bytes == b.lse.bytes &&
                  a.dout.bytes == b.dout.bytes && a.dlse.bytes == b.dlse.bytes &&
                  a.extra.sink.bytes == b.extra.sink.bytes)
          << to_id(c);
      continue;
    }
    const ForwardTensors a = make_forward_tensors(c), b = make_forward_tensors(parsed(to_id(c)));
    EXPECT_TRUE(a.q.bytes == b.q.bytes && a.k.bytes == b.k.bytes && a.v.bytes == b.v.bytes &&
                a.extra.sink.bytes == b.extra.sink.bytes &&
                a.extra.k_scale.bytes == b.extra.k_scale.bytes &&
                a.extra.cu_seqlens_k.bytes == b.extra.cu_seqlens_k.bytes)
        << to_id(c);
  }
}

TEST(CaseId, LayoutsAndScalesOfOneTensor) {
  const std::string dense = "bf16/b2/q9/k17/h4x2/d24/full";
  const Case c = parsed(dense + "/odd/k:bhsd.at3.gap8.heads0/dout:padded.wild/bwd");
  EXPECT_EQ(to_id(c), dense + "/odd/k:bhsd.at3.gap8.heads0/dout:padded.wild/bwd");
  EXPECT_EQ(c.layout_of(TensorName::kQ), (TensorLayout{.layout = Layout::kOdd, .offset = 1}));
  const BackwardTensors t = make_backward_tensors(c);
  EXPECT_EQ(t.k.view.stride[0], 2 * 17 * 32);
  EXPECT_EQ(t.k.view.stride[1], 32);
  EXPECT_EQ(t.k.view.stride[2], 0);
  EXPECT_EQ(t.k.offset % 256, 6u);
  EXPECT_EQ(t.dk.offset % 256, 2u);
  EXPECT_EQ(t.q.view.stride[2], 27);
  EXPECT_EQ(t.dout.view.stride[2], 32);
  const Case fp8 = parsed("e4m3/b2/q9/k17/h4x2/d24/full/headscales/v:onescale/k:noscale");
  EXPECT_EQ(fp8.scales_of(TensorName::kQ), Scales::kHead);
  const ForwardTensors f = make_forward_tensors(fp8);
  EXPECT_EQ(f.extra.q_scale.view.ndim, 2);
  EXPECT_EQ(f.extra.k_scale.view.ndim, 0);
  EXPECT_EQ(f.extra.v_scale.view.ndim, 1);
  for (const char* bad :
       {"k:", "k:odd.", "k:odd.at", "x:odd", "k:odd.at-1", "k:at3", "lse:onescale"})
    EXPECT_FALSE(parse_id(dense + "/" + bad, nullptr).has_value()) << bad;
}

// What is counted of a case: pairs that are seen, FLOPs, bytes.

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
        for (int64_t n = 0; n < pairs.seq_q * pairs.seq_k; ++n) seen += pairs.of(b, h)[n];
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

TEST(MaskCases, MeetAllLengths) {
  std::set<std::pair<std::string, int>> of_sources;
  std::set<std::tuple<bool, int64_t, int64_t, int64_t, int>> of_bands;
  std::set<std::pair<CaseMaskSource, bool>> of_max;
  for (const Case& c : mask_case_table(Level::kFull, dtypes_of(FLASH3_BACKEND_CPU), true)) {
    if (!c.is_ragged()) continue;
    const int packing = c.packed_q + 2 * c.packed_k + 4 * c.used_q + 8 * c.used_k;
    CaseMask source = c.mask;
    source.of_batch = source.of_heads = false;
    of_sources.insert({to_text(source), packing});
    of_bands.insert({c.causal, c.window_left, c.window_right, c.chunk, packing});
    of_max.insert({c.mask.source, c.max_known});
  }
  EXPECT_EQ(of_sources.size(), 12u * 15);
  EXPECT_EQ(of_bands.size(), 5u * 15);
  EXPECT_EQ(of_max.size(), 7u * 2);
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
