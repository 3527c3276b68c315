// SPDX-License-Identifier: Apache-2.0
// flash3 bench as a user meets it: tables and files.
#include "program.hpp"

namespace flash3::cli {
namespace {

TEST_F(Cli, BenchWritesTablesAndFiles) {
  const Outcome o = flash3("bench --backend cpu --samples 3 --sample-ms 1 --naive --json " +
                           path("r.json") + " --csv " + path("r.csv") +
                           " --case bf16/b1/q64/k64/h2/d64/causal --case fp32/b1/q9/k9/h2/d8/full");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("TFLOP/s"), std::string::npos);
  const json r = json::parse(slurp(path("r.json")));
  for (const char* field : {"flash3", "commit", "date", "host", "backend", "device"})
    EXPECT_TRUE(r["metadata"][field].is_string()) << field;
  ASSERT_EQ(r["results"].size(), 2u);
  const json& first = r["results"][0];
  EXPECT_EQ(first["case"], "bf16/b1/q64/k64/h2/d64/causal");
  EXPECT_EQ(first["samples"], 3);
  EXPECT_GT(first["median_ms"], 0);
  EXPECT_LE(first["p10_ms"], first["median_ms"]);
  EXPECT_LE(first["median_ms"], first["p90_ms"]);
  EXPECT_NEAR(first["tflops"].get<double>() * first["median_ms"].get<double>() * 1e9,
              4. * 64 * 64 * 64 * 2 / 2, 1);
  EXPECT_GT(first["speedup_over_naive"], 0);
  std::istringstream csv(slurp(path("r.csv")));
  int lines = 0;
  for (std::string line; std::getline(csv, line); ++lines)
    EXPECT_EQ(std::count(line.begin(), line.end(), ','), 14) << line;
  EXPECT_EQ(lines, 3);
}

// The plain implementation refuses a mask without its pairs.
TEST_F(Cli, BenchTimesThePlainImplementationOfAMask) {
  const Outcome o =
      flash3("bench --backend cpu --samples 2 --sample-ms 0 --naive --json " + path("r.json") +
             " --case fp32/b1/q140/k150/h2/d8/full/mask:dense"
             " --case fp32/b1/q140/k150/h2/d8/causal/mask:ranges2.h/bwd");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  for (const json& r : json::parse(slurp(path("r.json")))["results"])
    EXPECT_GT(r["speedup_over_naive"], 0) << r["case"];
}

TEST_F(Cli, BenchOfTheBackwardTellsItsMemory) {
  const Outcome o = flash3(
      "bench --backward --deterministic --backend cpu --samples 2 --sample-ms 0 --naive --json " +
      path("r.json") + " --case bf16/b1/q64/k64/h2/d64/causal");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("workspace MiB"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("scores MiB"), std::string::npos) << o.out;
  const json row = json::parse(slurp(path("r.json")))["results"][0];
  EXPECT_EQ(row["case"], "bf16/b1/q64/k64/h2/d64/causal/bwd/deterministic");
  EXPECT_NE(row["kernel"].get<std::string>().find("bwd"), std::string::npos) << row;
  EXPECT_GT(row["workspace_bytes"], 0);
  EXPECT_EQ(row["score_matrix_bytes"], 2 * 2 * 64 * 64);
  EXPECT_NEAR(row["tflops"].get<double>() * row["median_ms"].get<double>() * 1e9,
              2.5 * 4 * 64 * 64 * 64 * 2 / 2, 1);
}

TEST_F(Cli, BenchTellsTheTimeOfAWindowPerKey) {
  const Outcome o =
      flash3("bench --backend cpu --suite window --filter /d64/ --samples 1 --sample-ms 0 --json " +
             path("r.json"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("us/key"), std::string::npos) << o.out;
  const json r = json::parse(slurp(path("r.json")));
  EXPECT_EQ(r["metadata"]["suite"], "window");
  const json& results = r["results"];
  ASSERT_EQ(results.size(), 5u);  // 128, 256, 512, 1024 and no window on 2048 keys
  double keys = 0;
  for (const json& row : results) {
    EXPECT_GT(row["keys_per_query"], keys) << row;
    keys = row["keys_per_query"];
    EXPECT_NEAR(row["us_per_key"].get<double>() * keys, 1e3 * row["median_ms"].get<double>(), 1e-6);
    // Useful operations: those of the pairs that are seen, but for the convention of one half.
    EXPECT_NEAR(row["tflops"].get<double>() * row["median_ms"].get<double>() * 1e9 /
                    (4. * 64 * 2 * 2048 * keys),
                1, 1e-3);
  }
  // 2048 queries see 129 keys each, the first 128 fewer: 1 … 128.
  EXPECT_EQ(results[0]["keys_per_query"], (2048. * 129 - 128. * 129 / 2) / 2048);
  EXPECT_EQ(results[4]["keys_per_query"], 1024.5);
}

TEST_F(Cli, BenchOfTheRaggedSuiteGivesRatios) {
  const Outcome o = flash3(
      "bench --backend cpu --suite ragged --filter /d64/ --filter /q512/ --filter /causal/ "
      "--samples 2 --sample-ms 0 --json " +
      path("r.json"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("cost/token"), std::string::npos) << o.out;
  const json results = json::parse(slurp(path("r.json")))["results"];
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0]["case"], "bf16/b8/q512/k512/h8/d64/causal/packed");
  EXPECT_EQ(results[0]["beside"], "bf16/b8/q512/k512/h8/d64/causal");
  EXPECT_NEAR(results[0]["ratio"].get<double>(),
              results[0]["beside_ms"].get<double>() / results[0]["median_ms"].get<double>(), 1e-9);
}

// What counts is what the mask lets through, on both sides of the ratio.
TEST_F(Cli, BenchOfMasksCountsThePairsThatAreSeen) {
  const std::string suite =
      "bench --backend cpu --suite masks --filter /q512/ --samples 2 --sample-ms 0 --json " +
      path("r.json");
  const Outcome o = flash3(suite + " --csv " + path("r.csv"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("full/ranges/bits"), std::string::npos) << o.out;
  const json r = json::parse(slurp(path("r.json")));
  EXPECT_EQ(r["metadata"]["suite"], "masks");
  ASSERT_EQ(r["results"].size(), 4u);  // causal and random bits, forward and backward
  for (const json& row : r["results"]) {
    const std::string id = row["case"];
    const bool backward = id.ends_with("/bwd"), causal = id.find("mask:causal") != id.npos;
    EXPECT_EQ(row["beside"], "bf16/b1/q512/k512/h4/d128/" +
                                 std::string(causal ? "causal" : "full") +
                                 (backward ? "/bwd" : ""));
    const double all = 512. * 512, density = row["density"];
    if (causal) {
      EXPECT_EQ(density, 513. / 1024);
      EXPECT_EQ(row["full_blocks"], 6);
      EXPECT_EQ(row["range_blocks"], 4);
    } else {
      EXPECT_NEAR(density, 0.5, 0.01);
      EXPECT_EQ(row["bit_blocks"], 16);
    }
    const double work = all * 4 * 128 * (backward ? 10 : 4) * 1e-9;  // GFLOP
    EXPECT_NEAR(row["tflops"].get<double>() * row["median_ms"].get<double>() / (work * density), 1,
                1e-6);
    EXPECT_NEAR(row["beside_tflops"].get<double>() * row["beside_ms"].get<double>() /
                    (work * (causal ? density : 1)),
                1, 1e-6);
    EXPECT_NEAR(row["ratio"].get<double>() * row["beside_tflops"].get<double>() /
                    row["tflops"].get<double>(),
                1, 1e-9);
  }
  EXPECT_NE(slurp(path("r.csv")).find("density"), std::string::npos);
  // Of a suite that has both, the gradients.
  ASSERT_EQ(flash3(suite + " --backward").exit_code, 0);
  const json gradients = json::parse(slurp(path("r.json")))["results"];
  ASSERT_EQ(gradients.size(), 2u);
  for (const json& row : gradients) EXPECT_TRUE(row["case"].get<std::string>().ends_with("/bwd"));
  // A call without a mask has no such figures.
  ASSERT_EQ(flash3("bench --backend cpu --samples 1 --sample-ms 0 --case fp32/b1/q9/k9/h2/d8/full "
                   "--json " +
                   path("r.json"))
                .exit_code,
            0);
  EXPECT_FALSE(json::parse(slurp(path("r.json")))["results"][0].contains("density"));
}

TEST_F(Cli, BenchListsWithoutRunning) {
  const Outcome o = flash3(
      "bench --backend hopper --suite ragged --backward --filter lognormal65536:7 "
      "--filter /d128/ --list --json " +
      path("r.json"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json cases = json::parse(slurp(path("r.json")))["cases"];
  ASSERT_EQ(cases.size(), 1u);
  EXPECT_EQ(cases[0]["tokens"], 65536);
  EXPECT_TRUE(cases[0]["case"].get<std::string>().ends_with("lognormal65536:7/packed/bwd"));
  EXPECT_TRUE(cases[0]["beside"]["case"].get<std::string>().ends_with("/causal/bwd"));
  expect_usage_error("bench --list --ceiling", "excludes");
}

TEST_F(Cli, BenchTellsBurstAndSustainedSpeed) {
  const Outcome o = flash3(
      "bench --backend cpu --sustained 0.2 --sample-ms 1 --case fp32/b1/q64/k64/h1/d64/full "
      "--json " +
      path("r.json") + " --csv " + path("r.csv"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("sustained"), std::string::npos) << o.out;
  const json row = json::parse(slurp(path("r.json")))["results"][0];
  EXPECT_GE(row["burst_samples"], 1);  // 5, but on a machine so busy that they fill half the run
  EXPECT_LE(row["burst_samples"], 5);
  EXPECT_GT(row["burst_tflops"], 0);
  EXPECT_GT(row["steady_seconds"], 0.01);  // half of 0.2 s, less on a machine that is busy
  EXPECT_NEAR(row["tflops"].get<double>() * row["sustained_ms"].get<double>() * 1e9,
              4. * 64 * 64 * 64, 1);
  EXPECT_FALSE(row.contains("median_ms"));
  EXPECT_NE(slurp(path("r.csv")).find("sustained_ms"), std::string::npos);
}

// Without a Hopper GPU a clear answer before anything runs, with one the figures.
TEST_F(Cli, BenchCeiling) {
  const Outcome o =
      flash3("bench --ceiling --suite quick --filter /d64/ --json " + path("ceiling.json"));
  if (!has_hopper()) {
    EXPECT_EQ(o.exit_code, 1);
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(o.err.find("flash3: --ceiling needs a Hopper GPU: "), 0u) << o.err;
    EXPECT_FALSE(fs::exists(path("ceiling.json")));
    return;
  }
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json r = json::parse(slurp(path("ceiling.json")));
  ASSERT_EQ(r["ceiling"].size(), 2u);
  EXPECT_EQ(r["ceiling"][0]["when"], "before");
  EXPECT_EQ(r["ceiling"][1]["when"], "after");
  const Outcome fp8 = flash3("bench --ceiling --suite fp8 --filter /q512/ --filter /d64/ --json " +
                             path("fp8_ceiling.json"));
  ASSERT_EQ(fp8.exit_code, 0) << fp8.err;
  const json of_fp8 = json::parse(slurp(path("fp8_ceiling.json")));
  ASSERT_EQ(of_fp8["ceiling"].size(), 4u);  // bf16 and e4m3, before and after
  EXPECT_EQ(of_fp8["ceiling"][1]["dtype"], "e4m3");
  for (const json& point : of_fp8["results"])
    for (const char* share : {"share_of_ceiling", "beside_share_of_ceiling"}) {
      EXPECT_GT(point[share], 0.05) << point;
      EXPECT_LT(point[share], 1) << point;
    }

  for (const json& ceiling : r["ceiling"]) {
    EXPECT_EQ(ceiling["dtype"], "bf16");
    EXPECT_GT(ceiling["percent_of_peak"], 50);
    EXPECT_LE(ceiling["percent_of_peak"], 100.2);
  }
  for (const json& row : r["results"])
    EXPECT_NEAR(row["share_of_ceiling"].get<double>() * r["ceiling"][0]["tflops"].get<double>(),
                row["tflops"].get<double>(), 1e-6);
}

// Without a Hopper GPU a clear answer before anything runs.
TEST_F(Cli, Trace) {
  const Outcome o = flash3("trace bf16/b1/q256/k512/h2/d128/causal --output " + path("trace.json"));
  if (!has_hopper()) {
    EXPECT_EQ(o.exit_code, 1);
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(o.err.find("flash3: trace needs a Hopper GPU: "), 0u) << o.err;
    EXPECT_FALSE(fs::exists(path("trace.json")));
    return;
  }
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json r = json::parse(slurp(path("trace.json")));
  EXPECT_EQ(r["otherData"]["case"], "bf16/b1/q256/k512/h2/d128/causal");
  EXPECT_EQ(r["otherData"]["stamps_left_out"], 0);
  EXPECT_GT(r["traceEvents"].size(), 50u);
  EXPECT_EQ(flash3("trace fp16/b1/q256/k512/h2/d128/causal").exit_code, 1);
}

// Without a Hopper GPU a clear answer before anything runs, with one all schedules beside the
// first.
TEST_F(Cli, BenchAblation) {
  const Outcome o =
      flash3("bench --ablation --samples 2 --sample-ms 4 --json " + path("ablation.json"));
  if (!has_hopper()) {
    EXPECT_EQ(o.exit_code, 1);
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(o.err.find("flash3: --ablation needs a Hopper GPU: "), 0u) << o.err;
    EXPECT_FALSE(fs::exists(path("ablation.json")));
    return;
  }
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json r = json::parse(slurp(path("ablation.json")));
  EXPECT_EQ(r["metadata"]["case"], "fp16/b4/q8448/k8448/h16/d128/full");
  ASSERT_EQ(r["ablation"].size(), 6u);
  EXPECT_EQ(r["ablation"][0]["share_of_full"], 1);
  EXPECT_EQ(r["ablation"][0]["paper_tflops"], 661);
  for (const json& row : r["ablation"]) {
    EXPECT_GT(row["tflops"], 100) << row;
    EXPECT_NEAR(row["share_of_full"].get<double>() * r["ablation"][0]["tflops"].get<double>(),
                row["tflops"].get<double>(), 1e-6);
  }

  const Outcome fp8 = flash3("bench --ablation --dtype e4m3 --samples 2 --sample-ms 4 --json " +
                             path("fp8_ablation.json"));
  ASSERT_EQ(fp8.exit_code, 0) << fp8.err;
  const json rows = json::parse(slurp(path("fp8_ablation.json")))["ablation"];
  ASSERT_EQ(rows.size(), 5u);
  for (const json& row : rows) {
    EXPECT_GT(row["tflops"], 100) << row;
    EXPECT_FALSE(row.contains("paper_tflops")) << row;
  }
}
TEST_F(Cli, BenchOfTheDecodeSuiteTellsTheShareOfACopy) {
  const Outcome o = flash3(
      "bench --backend cpu --suite decode --threads 1 --filter /b16/ --samples 1 --sample-ms 0 "
      "--json " +
      path("r.json") + " --csv " + path("r.csv"));
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("% copy"), std::string::npos) << o.out;
  const json r = json::parse(slurp(path("r.json")));
  EXPECT_EQ(r["metadata"]["suite"], "decode");
  EXPECT_EQ(r["copy"]["bytes"], 256 << 20);
  const double copy = r["copy"]["gbps"];
  EXPECT_GT(copy, 0);
  EXPECT_NE(o.out.find("copy: "), std::string::npos) << o.out;
  size_t beside = 0;
  for (const json& row : r["results"]) {
    EXPECT_NEAR(row["share_of_copy"].get<double>(), row["gbps"].get<double>() / copy, 1e-9) << row;
    EXPECT_NEAR(row["median_us"].get<double>(), 1e3 * row["median_ms"].get<double>(), 1e-6) << row;
    EXPECT_GE(row["buffers"], 2) << row;
    EXPECT_EQ(row["calls_per_sample"].get<int>() % row["buffers"].get<int>(), 0) << row;
    EXPECT_GE(row["gbps"].get<double>() * row["median_us"].get<double>() * 1e3,
              row["kv_bytes"].get<double>())
        << row;
    if (!row.contains("beside")) continue;
    ++beside;
    EXPECT_NEAR(row["beside_gbps"].get<double>() / copy, row["beside_share_of_copy"].get<double>(),
                1e-9)
        << row;
  }
  EXPECT_EQ(r["results"].size(), 40u);
  EXPECT_EQ(beside, 2u * 3 + 1 + 5 + 13);
  EXPECT_NE(slurp(path("r.csv")).find(",share_of_copy,"), std::string::npos);
}

TEST_F(Cli, BenchTimesAnyCallOnACache) {
  const std::string cases =
      " --case "
      "fp32/b3/q2/k40/h4x2/d16/causal/random/packedq/paged16/leftpad/append2/packednew/rotary"
      " --case fp16/b2/q1/k9/h2/d8/full/batchidx --case bf16/b2/q1/k9/h2/d8/full/usedk/sink";
  const Outcome o =
      flash3("bench --backend cpu --threads 1 --samples 2 --sample-ms 0 --naive --json " +
             path("r.json") + cases);
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  const json results = json::parse(slurp(path("r.json")))["results"];
  ASSERT_EQ(results.size(), 3u);
  for (const json& row : results) {
    EXPECT_GT(row["median_us"], 0) << row;
    EXPECT_GT(row["speedup_over_naive"], 0) << row;
  }
  const Outcome sustained =
      flash3("bench --backend cpu --threads 1 --sustained 0.2 --sample-ms 1 --json " +
             path("s.json") + " --case bf16/b2/q1/k900/h2/d64/full/paged16");
  ASSERT_EQ(sustained.exit_code, 0) << sustained.out << sustained.err;
  const json row = json::parse(slurp(path("s.json")))["results"][0];
  EXPECT_NEAR(row["sustained_us"].get<double>(), 1e3 * row["sustained_ms"].get<double>(), 1e-6);
}

}  // namespace
}  // namespace flash3::cli
