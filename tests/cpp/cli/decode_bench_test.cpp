// SPDX-License-Identifier: Apache-2.0
// How flash3 bench times calls on a KV cache: its cases, its buffers and what it tells.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "../parsed.hpp"
#include "cases/cache_tensors.hpp"
#include "cli/bench_report.hpp"
#include "cli/workbench.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::parsed;

TEST(DecodeSuite, HasEachOfItsCallsOnce) {
  for (const flash3_backend backend : {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
    std::set<std::string> ids;
    for (const auto& [c, beside] : bench_suite("decode", backend)) {
      EXPECT_TRUE(ids.insert(to_id(c)).second) << to_id(c);
      EXPECT_TRUE(c.reads_cache() && c.causal != c.tree && c.used_k) << to_id(c);
      EXPECT_EQ(parsed(to_id(c)), c) << to_id(c);
      if (c.kv8) {
        ASSERT_TRUE(beside) << to_id(c);
        Case wide = c;
        wide.kv8 = false, wide.scales = cases::Scales::kNone;
        EXPECT_EQ(*beside, wide);
      } else if (c.qv) {
        ASSERT_TRUE(beside && beside->latent) << to_id(c);
        EXPECT_EQ(flops(c), flops(*beside)) << to_id(c);
        EXPECT_EQ(kv_bytes(c), kv_bytes(*beside)) << to_id(c);
      } else if (c.page_size > 0 && !c.latent) {
        ASSERT_TRUE(beside) << to_id(c);
        Case dense = c;
        dense.page_size = 0;
        EXPECT_EQ(*beside, dense);
      } else if (c.tree || (c.seq_q > 1 && c.seq_q <= 16)) {
        ASSERT_TRUE(beside) << to_id(c);
        Case one = c;
        one.seq_q = 1, one.tree = false, one.causal = true;
        EXPECT_EQ(*beside, one);
      }
    }
    EXPECT_EQ(ids.size(), 16u + 12 + 12 + (24 + 15 + 2) + 4 + 22 + 9 + 24);
  }
}

TEST(DecodeSuite, OnAGpuIsThatOfServing) {
  std::set<std::string> ids;
  for (const BenchPoint& point : bench_suite("decode", FLASH3_BACKEND_HOPPER))
    ids.insert(to_id(point.c));
  for (const char* id :
       {"bf16/b1/q1/k131072/h32x8/d128/causal/usedk", "bf16/b256/q1/k16384/h32x8/d128/causal/usedk",
        "bf16/b64/q1/k4096/h32x8/d128/causal/usedk/paged1",
        "bf16/b16/q1/k4096/h128x8/d128/causal/usedk", "bf16/b1/q1/k16384/h16/d128/causal/usedk",
        "bf16/b16/q1/k4096/h32x8/d256/causal/usedk", "bf16/b64/q4/k4096/h32x8/d128/causal/usedk",
        "bf16/b4/q512/k16384/h32x8/d128/causal/usedk/paged64",
        "bf16/b16/q512/k4096/h32x8/d128/causal/mixed/packedq/usedk",
        "bf16/b64/q1/k65536/h32x8/d128/causal/loguniform/usedk"})
    EXPECT_TRUE(ids.contains(id)) << id;
}

TEST(DecodeSuite, EqualLengthsHaveAsManyBytesAsRaggedOnes) {
  int ragged = 0;
  for (const flash3_backend backend : {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU})
    for (const auto& [c, beside] : bench_suite("decode", backend)) {
      if (c.lengths != cases::Lengths::kLogUniform) continue;
      ++ragged;
      ASSERT_TRUE(beside) << to_id(c);
      EXPECT_EQ(beside->lengths, cases::Lengths::kAll);
      EXPECT_NEAR(kv_bytes(*beside) / kv_bytes(c), 1, 0.02) << to_id(c);
    }
  EXPECT_EQ(ragged, 4);
}

// Rows of the lengths once, however large the cache is.
TEST(CacheBytes, AreThoseOfTheKeysThatCount) {
  const Case full = parsed("bf16/b3/q2/k40/h4x2/d16x24/full/usedk/nolse");
  EXPECT_EQ(kv_bytes(full), 3 * 40 * 2 * (16 + 24) * 2);
  EXPECT_EQ(tensor_bytes(full), kv_bytes(full) + 3 * 2 * 4 * (16 + 24) * 2);
  for (const char* same : {"/paged16", "/batchidx", "/leftpad"})
    EXPECT_EQ(tensor_bytes(parsed(to_id(full) + same)), tensor_bytes(full)) << same;

  const Case random = parsed("bf16/b9/q1/k40/h2/d16/causal/random/usedk");
  int64_t keys = 0;
  for (const int32_t n : make_sequences(random).k.used) keys += n;
  EXPECT_EQ(kv_bytes(random), static_cast<double>(keys * 2 * (16 + 16) * 2));

  // Appended keys count with the others, and are read where they come from too.
  const Case dense = parsed(to_id(full) + "/append5");
  EXPECT_EQ(kv_bytes(dense), 3 * 45 * 2 * (16 + 24) * 2);
  EXPECT_EQ(tensor_bytes(dense) - kv_bytes(dense),
            tensor_bytes(full) - kv_bytes(full) + 3 * 5 * 2 * (16 + 24) * 2);
  EXPECT_EQ(flops(dense), 2. * 3 * 2 * 45 * 4 * (16 + 24));
  const Case packed = parsed(to_id(full) + "/append5/packednew");
  const int64_t added = cases::make_cache_plan(packed).cu_new.back();
  EXPECT_GT(added, 0);
  EXPECT_EQ(kv_bytes(packed), static_cast<double>((3 * 40 + added) * 2 * (16 + 24) * 2));
}

std::vector<std::byte> bytes_of(const flash3_tensor& t) {
  const auto* data = static_cast<const std::byte*>(t.data);
  return {data, data + cases::span_of(t) * cases::element_size(t.dtype)};
}

// What a round leaves in out and in the first buffer is what one call of the library leaves.
TEST(Workbench, ARoundMakesTheCallsOfItsCase) {
  Workbench workbench(FLASH3_BACKEND_CPU, 1);
  for (const char* id :
       {"bf16/b3/q2/k300/h4x2/d64/causal/loguniform/usedk",
        "fp32/b3/q5/k300/h4x2/d16/causal/random/packedq/paged16/leftpad/append3/packednew/rotary",
        "fp16/b4/q9/k40/h2/d8/causal/mixed/packedq/batchidx/append2/rotary2/offsets/sink"}) {
    PreparedCase p = workbench.prepare(parsed(id));
    EXPECT_GE(p.calls, 2) << id;
    const flash3_forward_params& f = p.forward;
    const auto out = bytes_of(f.out), k = bytes_of(f.k), v = bytes_of(f.v);
    std::fill_n(static_cast<std::byte*>(f.out.data), out.size(), std::byte{7});
    p.enqueue();
    // As the first round, which was made before anything was recorded; appending again too.
    EXPECT_EQ(bytes_of(f.k), k) << id;
    EXPECT_EQ(bytes_of(f.v), v) << id;
    const auto again = bytes_of(f.out);
    EXPECT_NE(again, std::vector<std::byte>(out.size(), std::byte{7})) << id;

    flash3_forward_params alone = f;
    alone.schedule = nullptr;
    std::fill_n(static_cast<std::byte*>(f.out.data), out.size(), std::byte{7});
    ASSERT_EQ(flash3_forward(&alone), FLASH3_OK) << id << ": " << flash3_last_error();
    EXPECT_EQ(bytes_of(f.out), again) << id;
    EXPECT_EQ(bytes_of(f.k), k) << id;
  }
}

TEST(Workbench, KeysOfALargeCacheAreAllNormal) {
  Workbench workbench(FLASH3_BACKEND_CPU, 1);
  const PreparedCase p = workbench.prepare(parsed("bf16/b1/q1/k40000/h2/d64/full/usedk"));
  const int64_t count = cases::span_of(p.forward.k);
  ASSERT_EQ(count, 40000 * 2 * 64);  // more than the block that is copied on
  double sum = 0, squares = 0;
  for (int64_t i = count - 1'000'000; i < count; ++i) {
    const double x = load_float(p.forward.k.data, FLASH3_BFLOAT16, i);
    sum += x, squares += x * x;
  }
  EXPECT_NEAR(sum / 1e6, 0, 0.01);
  EXPECT_NEAR(squares / 1e6, 1, 0.01);
}

TEST(Timing, OfARoundIsThatOfItsCalls) {
  const Timing t =
      per_call({.median = 8, .p10 = 4, .p90 = 12, .samples = 3, .calls_per_sample = 5}, 4);
  EXPECT_EQ(t.median, 2);
  EXPECT_EQ(t.p10, 1);
  EXPECT_EQ(t.p90, 3);
  EXPECT_EQ(t.samples, 3);
  EXPECT_EQ(t.calls_per_sample, 20);
}

TEST(BenchReport, ACallOnACacheHasItsShareOfACopy) {
  BenchResult r;
  r.c = parsed("bf16/b4/q1/k4096/h32x8/d128/causal/usedk/paged16");
  r.timing.median = tensor_bytes(r.c) / 2e12;  // 2 TB/s
  r.buffers = 3;
  r.beside = parsed("bf16/b4/q1/k4096/h32x8/d128/causal/usedk");
  r.beside_timing.median = r.timing.median / 2;
  EXPECT_EQ(r.percent_of_copy(), 0);
  r.copy_gbps = 8000;
  EXPECT_NEAR(r.percent_of_copy(), 25, 1e-9);
  const Json j = to_json(r);
  EXPECT_NEAR(j["share_of_copy"].get<double>(), 0.25, 1e-12);
  EXPECT_NEAR(j["beside_share_of_copy"].get<double>(), 0.5, 1e-12);
  EXPECT_NEAR(j["beside_gbps"].get<double>(), 4000, 1e-9);
  EXPECT_NEAR(j["median_us"].get<double>(), 1e6 * r.timing.median, 1e-9);
  EXPECT_NEAR(j["beside_us"].get<double>(), 5e5 * r.timing.median, 1e-9);
  EXPECT_EQ(j["buffers"], 3);
  EXPECT_EQ(copy_line({size_t{256} << 20, 8000}),
            "copy: 8000.0 GB/s, read and written, of 256 MiB");

  BenchTable table;
  table.gpu = table.cache = table.ragged = true;
  table.case_width = to_id(r.c).size(), table.beside_width = to_id(*r.beside).size();
  EXPECT_EQ(table.header().size(), table.row(r).size()) << table.header() << "\n" << table.row(r);
  EXPECT_NE(table.row(r).find(" 25.0%"), std::string::npos) << table.row(r);
  EXPECT_NE(table.header().find("        us "), std::string::npos) << table.header();
}

}  // namespace
}  // namespace flash3::cli
