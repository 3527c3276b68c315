// The suites and the tables of flash3 bench.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/suites.hpp"
#include "cli/timing.hpp"

namespace flash3::cli {
namespace {

std::set<std::string> ids(const std::vector<cases::Case>& suite) {
  std::set<std::string> all;
  for (const cases::Case& c : suite) EXPECT_TRUE(all.insert(to_id(c)).second) << to_id(c);
  return all;
}

TEST(Suites, ForwardIsThePapersSweep) {
  const auto suite = bench_suite("forward", FLASH3_BACKEND_HOPPER);
  EXPECT_EQ(suite.size(), 36u);
  for (const cases::Case& c : suite) {
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
  for (cases::Case& c : suite) {
    EXPECT_TRUE(c.backward && c.want_lse) << to_id(c);
    c.backward = false;
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

TEST(Suites, OthersAreRefused) {
  EXPECT_THROW(bench_suite("marathon", FLASH3_BACKEND_CPU), UsageError);
}

BenchResult result() {
  BenchResult r;
  r.c = bench_suite("forward", FLASH3_BACKEND_HOPPER).front();
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
  const auto timings = measure_in_turn(memory, calls, 4, 0, [&] { started = true; });
  ASSERT_EQ(timings.size(), 3u);
  for (const Timing& t : timings) {
    EXPECT_EQ(t.samples, 4);
    EXPECT_LE(t.p10, t.median);
    EXPECT_LE(t.median, t.p90);
  }
  order.erase(std::unique(order.begin(), order.end()), order.end());  // a sample is many calls
  EXPECT_EQ(order, "abcbcacababc");
}

}  // namespace
}  // namespace flash3::cli
