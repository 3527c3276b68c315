// SPDX-License-Identifier: Apache-2.0
// The suites and the tables of flash3 bench.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "cases/mask.hpp"
#include "cases/sequences.hpp"
#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/json_file.hpp"
#include "cli/timing.hpp"
#include "cli/workbench.hpp"
#include "device/bench_kernels.hpp"
#include "device/device.hpp"

namespace flash3::cli {
namespace {

std::set<std::string> ids(const std::vector<BenchPoint>& suite) {
  std::set<std::string> all;
  for (const auto& [c, beside] : suite) EXPECT_TRUE(all.insert(to_id(c)).second) << to_id(c);
  return all;
}

// The answer to --ceiling, --ablation and trace on a GPU, in a build that leaves their kernels out.
TEST(BenchKernels, WhereTheyAreMissingTheAnswerSaysHowToBuildThem) {
#ifdef FLASH3_BENCH_KERNELS
  EXPECT_NO_THROW(device::require_bench_kernels("--ceiling"));
#else
  try {
    device::require_bench_kernels("--ceiling");
    ADD_FAILURE() << "no exception";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(),
                 "--ceiling needs kernels that this build of flash3 leaves out; make bench builds "
                 "them (-DFLASH3_BENCH_KERNELS=ON, with a CUDA compiler)");
  }
  EXPECT_THROW(device::ablation_variants({}), std::runtime_error);
  cases::HostMemory memory;
  EXPECT_THROW(device::traced_call({}, 0, memory), std::runtime_error);
#endif
}

TEST(Suites, ForwardIsThePapersSweep) {
  const auto suite = bench_suite("forward", FLASH3_BACKEND_HOPPER);
  EXPECT_EQ(suite.size(), 36u);
  for (const auto& [c, beside] : suite) {
    EXPECT_FALSE(beside) << to_id(c);
    EXPECT_EQ(c.batch * c.seq_q, 16384) << to_id(c);
    EXPECT_EQ(c.heads_q * c.head_dim, 2048) << to_id(c);
  }
  const auto all = ids(suite);
  for (const char* id : {"bf16/b32/q512/k512/h32/d64/full", "bf16/b8/q2048/k2048/h16/d128/causal",
                         "bf16/b1/q16384/k16384/h8/d256/causal"})
    EXPECT_TRUE(all.contains(id)) << id;
}

TEST(Suites, BackwardIsTheSameSweep) {
  auto suite = bench_suite("backward", FLASH3_BACKEND_HOPPER);
  for (BenchPoint& point : suite) {
    EXPECT_TRUE(point.c.backward && point.c.want_lse) << to_id(point.c);
    point.c.backward = false;
  }
  EXPECT_EQ(ids(suite), ids(bench_suite("forward", FLASH3_BACKEND_HOPPER)));
}

TEST(Suites, WindowGoesFrom128KeysToNoWindow) {
  const auto all = ids(bench_suite("window", FLASH3_BACKEND_HOPPER, FLASH3_FLOAT16));
  EXPECT_EQ(all.size(), 18u);
  for (const char* shape :
       {"fp16/b1/q32768/k32768/h16/d128/causal", "fp16/b1/q32768/k32768/h32/d64/causal"})
    for (const char* window :
         {"", "+w128:", "+w256:", "+w512:", "+w1024:", "+w2048:", "+w4096:", "+w8192:", "+w16384:"})
      EXPECT_TRUE(all.contains(std::string(shape) + window)) << shape << window;
}

TEST(Suites, Fp8StandsBesideTheSweep) {
  const auto suite = bench_suite("fp8", FLASH3_BACKEND_HOPPER, FLASH3_FLOAT16);
  EXPECT_EQ(suite.size(), 36u);
  for (const auto& [c, beside] : suite) {
    EXPECT_EQ(c.dtype, FLASH3_FLOAT8_E4M3);
    EXPECT_EQ(c.dtype_of_out(), FLASH3_FLOAT16);
    EXPECT_EQ(c.scales, cases::Scales::kBlock);
    ASSERT_TRUE(beside);
    EXPECT_EQ(beside->dtype, FLASH3_FLOAT16);
    EXPECT_EQ(flops(*beside), flops(c));
  }
}

// The point of this id; the id must read back as the same case.
BenchPoint point_of(const std::vector<BenchPoint>& suite, const std::string& id) {
  for (const BenchPoint& point : suite)
    if (to_id(point.c) == id) return point;
  ADD_FAILURE() << id << " is not in the suite";
  return {};
}

TEST(Suites, RaggedHasTheSweepBesideItsDenseCalls) {
  const auto suite = bench_suite("ragged", FLASH3_BACKEND_HOPPER);
  for (const auto& [dense, none] : bench_suite("forward", FLASH3_BACKEND_HOPPER)) {
    const BenchPoint point = point_of(suite, to_id(dense) + "/packed");
    ASSERT_TRUE(point.beside) << to_id(dense);
    EXPECT_EQ(*point.beside, dense);
    EXPECT_EQ(flops(point.c), flops(dense));
  }
  EXPECT_EQ(suite.size(), 36u + 40u + 2u + 10u);
}

TEST(Suites, RaggedHasTwentyLongTailedDraws) {
  for (const flash3_backend backend : {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
    const int64_t tokens = backend == FLASH3_BACKEND_HOPPER ? 65536 : 16384;
    size_t draws = 0;
    for (const auto& [c, beside] : bench_suite("ragged", backend)) {
      if (c.lengths != cases::Lengths::kLogNormal) continue;
      ++draws;
      EXPECT_EQ(queries(c), tokens) << to_id(c);
      ASSERT_TRUE(beside) << to_id(c);
      EXPECT_NEAR(cost_per_token(c), static_cast<double>(beside->seq_q), 0.5) << to_id(c);
      EXPECT_NEAR(static_cast<double>(queries(*beside)), static_cast<double>(tokens),
                  static_cast<double>(beside->seq_q))
          << to_id(c);
      // As many operations for each token, so that the two speeds compare.
      EXPECT_NEAR(flops(*beside) / static_cast<double>(queries(*beside)) *
                      static_cast<double>(tokens) / flops(c),
                  1, 1e-3)
          << to_id(c);
      std::string error;
      EXPECT_EQ(cases::parse_id(to_id(c), &error), c) << error;
    }
    EXPECT_EQ(draws, 40u);
  }
}

TEST(Suites, RaggedHasShortSequencesAndWhatModelsAdd) {
  const auto suite = bench_suite("ragged", FLASH3_BACKEND_HOPPER);
  for (const char* id :
       {"bf16/b4096/q16/k16/h16/d128/full/packed", "bf16/b1024/q64/k64/h16/d128/full/packed",
        "bf16/b1/q16384/k16384/h64x8/d64/causal+w128:"})
    EXPECT_FALSE(point_of(suite, id).beside) << id;
  for (const char* plain :
       {"bf16/b1/q16384/k16384/h32/d64/causal", "bf16/b1/q16384/k16384/h16/d128/causal",
        "bf16/b1/q16384/k16384/h8/d256/causal"}) {
    EXPECT_FALSE(point_of(suite, plain).beside) << plain;
    for (const char* option : {"/sink", "/softcap50"}) {
      const auto beside = point_of(suite, std::string(plain) + option).beside;
      ASSERT_TRUE(beside) << plain << option;
      EXPECT_EQ(to_id(*beside), plain);
    }
  }
}

// Forward and backward, each beside a call, which of documents has the same pairs.
TEST(Suites, MasksStandBesideCallsWithoutThem) {
  for (const flash3_backend backend : {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
    const auto suite = bench_suite("masks", backend, FLASH3_FLOAT16);
    EXPECT_EQ(ids(suite).size(), 2u * (2 + 3 + 1 + 1 + 6 + 1));
    std::set<std::string> masks;
    size_t backward = 0;
    for (const auto& [c, beside] : suite) {
      std::string error;
      EXPECT_EQ(cases::parse_id(to_id(c), &error), c) << error;
      EXPECT_TRUE(c.mask.given() && c.dtype == FLASH3_FLOAT16) << to_id(c);
      ASSERT_TRUE(beside && !beside->mask.given()) << to_id(c);
      EXPECT_EQ(beside->backward, c.backward) << to_id(c);
      EXPECT_EQ(beside->heads_q, c.heads_q) << to_id(c);
      EXPECT_EQ(queries(*beside), queries(c)) << to_id(c);
      backward += c.backward;
      masks.insert(to_text(c.mask));
      if (backend == FLASH3_BACKEND_CPU && c.mask.source == cases::CaseMaskSource::kLogNormal) {
        EXPECT_EQ(seen_pairs(c), static_cast<double>(visible_pairs(*beside))) << to_id(c);
      }
    }
    EXPECT_EQ(2 * backward, suite.size());
    for (const char* mask : {"causal", "lognormal1", "share10of128x128.h", "share25of128x128.h",
                             "share50of128x128.h", "share25of64x64.h", "coins"})
      EXPECT_TRUE(masks.contains(mask)) << mask;
  }
}

TEST(Suites, OthersAreRefused) {
  EXPECT_THROW(bench_suite("marathon", FLASH3_BACKEND_CPU), UsageError);
}

BenchResult result() {
  BenchResult r;
  r.c = bench_suite("forward", FLASH3_BACKEND_HOPPER).front().c;
  r.timing.median = flops(r.c) / 600e12;  // 600 TFLOP/s
  r.timing.samples = 30;
  return r;
}

TEST(BenchReport, SharesAndEnergy) {
  BenchResult r = result();
  EXPECT_EQ(r.percent_of_ceiling(), 0);
  EXPECT_EQ(r.pj_per_flop(), 0);
  EXPECT_FALSE(to_json(r).contains("share_of_ceiling"));
  EXPECT_FALSE(to_json(r).contains("pj_per_flop"));

  r.ceiling_tflops = 800;
  r.reading.samples = 10;
  r.reading.watts = 480;
  EXPECT_NEAR(r.percent_of_ceiling(), 75, 1e-9);
  EXPECT_NEAR(r.pj_per_flop(), 0.8, 1e-9);
  r.reading.counted_watts = 660;  // the energy counter is the better of the two
  const Json j = to_json(r);
  EXPECT_NEAR(j["pj_per_flop"].get<double>(), 1.1, 1e-9);
  EXPECT_NEAR(j["share_of_ceiling"].get<double>(), 0.75, 1e-9);
  EXPECT_EQ(j["watts_from"], "energy counter");

  BenchTable table;
  table.gpu = table.ceiling = true;
  EXPECT_EQ(table.header().size(), table.row(r).size()) << table.header() << "\n" << table.row(r);
  EXPECT_NE(table.row(r).find(" 75.0%"), std::string::npos) << table.row(r);
}

TEST(BenchReport, ColumnsOfEveryKindOfRunLineUp) {
  for (const bool sustained : {false, true})
    for (const bool keys : {false, true}) {
      BenchResult r = result();
      r.workspace_bytes = size_t{123} << 20;
      if (sustained) {
        r.sustained.emplace();
        r.sustained->burst.median = r.sustained->seconds_a_call = r.timing.median;
      }
      BenchTable table;
      table.gpu = table.ceiling = true;
      table.sustained = sustained, table.keys = table.memory = keys;
      EXPECT_EQ(table.header().size(), table.row(r).size()) << table.header() << "\n"
                                                            << table.row(r);
    }
}

TEST(BenchReport, TheCaseBesideGivesTheRatio) {
  BenchResult r = result();
  EXPECT_EQ(r.ratio(), 0);
  EXPECT_FALSE(to_json(r).contains("ratio"));
  r.beside = r.c;
  r.beside->batch *= 2;  // twice the work in the same time: twice the speed
  r.beside_timing = r.timing;
  r.reading.samples = 10, r.reading.watts = 480;
  EXPECT_NEAR(r.ratio(), 0.5, 1e-12);
  EXPECT_EQ(r.pj_per_flop(), 0);  // the watts are of both
  r.c.packed_q = r.c.packed_k = true;
  const Json j = to_json(r);
  EXPECT_EQ(j["beside"], to_id(*r.beside));
  EXPECT_NEAR(j["beside_tflops"].get<double>(), 1200, 1e-9);
  EXPECT_NEAR(j["ratio"].get<double>(), 0.5, 1e-12);
  EXPECT_EQ(j["sequences"], r.c.batch);
  EXPECT_EQ(j["tokens"], 16384);
  EXPECT_EQ(j["cost_per_token"], 512);

  BenchTable table;
  table.gpu = table.ragged = true;
  table.case_width = to_id(r.c).size();
  table.beside_width = to_id(*r.beside).size();
  EXPECT_EQ(table.header().size(), table.row(r).size()) << table.header() << "\n" << table.row(r);
  EXPECT_NE(table.row(r).find(" 0.500 " + to_id(*r.beside)), std::string::npos) << table.row(r);
  r.beside.reset();
  EXPECT_EQ(table.header().size(), table.row(r).size()) << table.header() << "\n" << table.row(r);
}

// FP8 and 16 bits, each of its own ceiling.
TEST(BenchReport, TheCaseBesideHasAShareToo) {
  BenchResult r = result();
  r.beside = r.c;
  r.c.dtype = FLASH3_FLOAT8_E4M3;
  r.beside_timing = r.timing;
  r.ceiling_tflops = 1200;
  EXPECT_FALSE(to_json(r).contains("beside_share_of_ceiling"));
  r.beside_ceiling_tflops = 800;
  const Json j = to_json(r);
  EXPECT_NEAR(j["share_of_ceiling"].get<double>(), 0.5, 1e-9);
  EXPECT_NEAR(j["beside_share_of_ceiling"].get<double>(), 0.75, 1e-9);
}

TEST(BenchReport, CsvWritesAQuoteInsideATextTwice) {
  EXPECT_EQ(to_csv(Json::array({Json{{"a", "x, \"y\""}}})), "a\n\"x, \"\"y\"\"\"\n");
}

TEST(BenchReport, WorkIsCountedPerSequence) {
  std::string error;
  const auto c = cases::parse_id("bf16/b3/q9/k9/h2/d8/causal/lognormal16:2/packed", &error);
  ASSERT_TRUE(c) << error;
  const cases::CaseSequences sequences = cases::make_sequences(*c);
  double squares = 0;
  int64_t tokens = 0;
  for (int64_t b = 0; b < c->batch; ++b) {
    const int64_t n = sequences[b].q.length;
    tokens += n;
    squares += static_cast<double>(n * n);
  }
  ASSERT_GT(tokens, 0);
  const Json j = work_of(*c);
  EXPECT_EQ(j["sequences"], 3);
  EXPECT_EQ(j["tokens"], tokens);
  EXPECT_NEAR(j["cost_per_token"].get<double>(), squares / static_cast<double>(tokens), 1e-12);
  EXPECT_EQ(j["flops"], 4 * squares / 2 * 8 * 2);
  EXPECT_EQ(j["bytes"], tokens * (4 * 2 * 8 * 2 + 2 * 4));
}

TEST(BenchReport, TheCeilingInWatts) {
  device::CeilingResult c;
  c.head_dim = c.keys = 128;
  c.seconds = 2;
  c.flops = 1700e12;
  c.clock_hz = 1.75e9;
  EXPECT_EQ(c.tflops(), 850);
  EXPECT_EQ(c.pj_per_flop(), 0);
  EXPECT_NE(ceiling_line(c).find("no reading of the power"), std::string::npos);
  c.reading.samples = 100;
  c.reading.watts = 680;
  EXPECT_NE(ceiling_line(c).find("of bf16 WGMMA alone (m64n128k16 and m64n128k16"),
            std::string::npos);
  device::CeilingResult fp8 = c;
  fp8.dtype = FLASH3_FLOAT8_E4M3, fp8.keys = 64, fp8.head_dim = 256;
  EXPECT_NE(ceiling_line(fp8).find("of e4m3 WGMMA alone (m64n64k32 and m64n256k32"),
            std::string::npos);
  EXPECT_EQ(to_json(fp8, "after")["dtype"], "e4m3");
  const Json j = to_json(c, "before");
  EXPECT_EQ(j["when"], "before");
  EXPECT_EQ(j["dtype"], "bf16");
  EXPECT_NEAR(j["pj_per_flop"].get<double>(), 0.8, 1e-12);
  EXPECT_NEAR(j["sm_clock_mhz"].get<double>(), 1750, 1e-9);
}

TEST(Timing, SamplesTakeTurnsAndEachCallIsFirstInTurn) {
  cases::HostMemory memory;
  std::string order;
  bool started = false;
  std::vector<std::function<void()>> calls;
  for (const char name : {'a', 'b', 'c'})
    calls.push_back([&order, &started, name] {
      if (started) order += name;
    });
  const auto timings = measure_interleaved(memory, calls, 4, 0, [&] { started = true; });
  ASSERT_EQ(timings.size(), 3u);
  for (const Timing& t : timings) {
    EXPECT_EQ(t.samples, 4);
    EXPECT_LE(t.p10, t.median);
    EXPECT_LE(t.median, t.p90);
  }
  order.erase(std::unique(order.begin(), order.end()), order.end());  // a sample is many calls
  EXPECT_EQ(order, "abcbcacababc");
}

TEST(ReportText, HasARowOnALine) {
  const nlohmann::ordered_json report = {{"seed", 7},
                                         {"names", {"a", "b"}},
                                         {"none", nlohmann::ordered_json::array()},
                                         {"results", {{{"x", 1}, {"y", {1, 2}}}, {{"x", 2}}}},
                                         {"of", {{"cpu", {{"x", 3}}}, {"gpu", {{"x", 4}}}}}};
  EXPECT_EQ(report_text(report), R"({
 "seed": 7,
 "names": ["a","b"],
 "none": [],
 "results": [
  {"x":1,"y":[1,2]},
  {"x":2}
 ],
 "of": {
  "cpu": {"x":3},
  "gpu": {"x":4}
 }
}
)");
  EXPECT_EQ(nlohmann::ordered_json::parse(report_text(report)), report);
}

}  // namespace
}  // namespace flash3::cli
