// SPDX-License-Identifier: Apache-2.0
// flash3 compare as a user meets it, and what flash3 bench --share writes for it.
#include <algorithm>

#include "program.hpp"

namespace flash3::cli {
namespace {

// A file of bench --json: each case's median, p10 and p90 in milliseconds.
std::string report(const std::vector<std::pair<std::string, std::vector<double>>>& cases,
                   const std::string& device = "a GPU") {
  json results = json::array();
  for (const auto& [id, t] : cases)
    results.push_back({{"case", id}, {"median_ms", t[0]}, {"p10_ms", t[1]}, {"p90_ms", t[2]}});
  return json{{"metadata", {{"commit", "abc"}, {"device", device}, {"date", "2026"}}},
              {"results", results}}
      .dump();
}

class CliCompare : public Cli {
 protected:
  Outcome compare(const std::string& a, const std::string& b, const std::string& options = "") {
    std::ofstream(path("a.json")) << a;
    std::ofstream(path("b.json")) << b;
    return flash3("compare " + path("a.json") + " " + path("b.json") + options);
  }
  // Exit code 2, and both of these in the message.
  void expect_refused(const std::string& a, const std::string& b, const std::string& file,
                      const std::string& why) {
    const Outcome o = compare(a, b);
    EXPECT_EQ(o.exit_code, 2) << o.out;
    EXPECT_NE(o.err.find(file), std::string::npos) << o.err;
    EXPECT_NE(o.err.find(why), std::string::npos) << o.err;
  }
};

// The words of the line that begins with this.
std::vector<std::string> words_of(const std::string& text, const std::string& start) {
  std::istringstream lines(text);
  std::vector<std::string> words;
  for (std::string line; words.empty() && std::getline(lines, line);) {
    std::istringstream of_line(line.rfind(start, 0) == 0 ? line : "");
    for (std::string word; of_line >> word;) words.push_back(word);
  }
  return words;
}

TEST_F(CliCompare, TellsDifferencesFromNoise) {
  const Outcome o = compare(
      report(
          {{"x", {2, 1.9, 2.1}}, {"y", {4, 3.9, 4.2}}, {"z", {1, 0.9, 1.1}}, {"old", {1, 1, 1}}}),
      report({{"z", {1.25, 1.2, 1.3}}, {"x", {1, 0.95, 1.05}}, {"y", {3.9, 3.8, 4}}}));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  using Words = std::vector<std::string>;
  EXPECT_EQ(words_of(o.out, "x "), (Words{"x", "2.00000", "10.0%", "1.00000", "10.0%", "2.000",
                                          "1.810", "…", "2.211", "faster"}));
  EXPECT_EQ(words_of(o.out, "y "), (Words{"y", "4.00000", "7.5%", "3.90000", "5.1%", "1.026",
                                          "0.975", "…", "1.105", "within", "noise"}));
  EXPECT_EQ(words_of(o.out, "z "), (Words{"z", "1.00000", "20.0%", "1.25000", "8.0%", "0.800",
                                          "0.692", "…", "0.917", "slower"}));
  EXPECT_NE(o.out.find("in A alone: old\n"), std::string::npos) << o.out;
  EXPECT_EQ(o.out.find("in B alone"), std::string::npos) << o.out;
  EXPECT_EQ(o.out.find("different devices"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("B has 1.180 of A's speed, the geometric mean of 3 cases: 1 faster, 1 "
                       "slower, 1 within noise"),
            std::string::npos)
      << o.out;
}

TEST_F(CliCompare, FailsBelowTheLeastSpeed) {
  const std::string a = report({{"x", {1, 1, 1}}, {"y", {1, 1, 1}}});
  const std::string mixed = report({{"x", {0.5, 0.5, 0.5}}, {"y", {1.1, 1.1, 1.1}}}, "another GPU");
  EXPECT_EQ(compare(a, mixed).exit_code, 0);
  EXPECT_EQ(compare(a, mixed, " --at-least 0.95").exit_code, 1) << "y is slower";
  EXPECT_EQ(compare(a, mixed, " --at-least 0.9").exit_code, 0);
  EXPECT_NE(compare(a, mixed).out.find("different devices"), std::string::npos);
  const std::string noisy = report({{"x", {1, 1, 1}}, {"y", {1.1, 0.9, 1.3}}});
  EXPECT_EQ(compare(a, noisy, " --at-least 0.95").exit_code, 0) << "noise, and a mean of 0.953";
  EXPECT_EQ(compare(a, noisy, " --at-least 0.96").exit_code, 1) << "the mean";
}

TEST_F(CliCompare, TakesWhatBenchWrites) {
  const std::string bench =
      "bench --backend cpu --samples 3 --sample-ms 0 --case "
      "fp32/b1/q9/k9/h2/d8/full --json ";
  for (const char* file : {"1.json", "2.json"}) ASSERT_EQ(flash3(bench + path(file)).exit_code, 0);
  const Outcome o = flash3("compare " + path("1.json") + " " + path("2.json"));
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("geometric mean of 1 cases"), std::string::npos) << o.out;
}

TEST_F(CliCompare, RefusesOtherFiles) {
  const std::string good = report({{"x", {1, 1, 1}}});
  expect_refused("{", good, "a.json", "is not JSON");
  expect_refused(good, "[]", "b.json", "has no metadata and results");
  expect_refused(good, R"({"metadata": {}, "results": [{}]})", "b.json", "a result has no case");
  expect_refused(good, report({{"x", {0, 0, 0}}}), "b.json", "a case has no median_ms");
  expect_refused(report({{"x", {1, 1, 1}}, {"x", {1, 1, 1}}}), good, "a.json", "x occurs twice");
  expect_refused(good, report({{"y", {1, 1, 1}}}), "b.json", "no case in common");
  expect_usage_error("compare " + path("a.json") + " " + path("none.json"),
                     "none.json: no such file");
  expect_usage_error("compare " + folder_.string() + " " + path("a.json"), "not a regular file");
  expect_refused(good, std::string(1'000'000, '['), "b.json", "more than 16 levels of arrays");
  expect_usage_error("compare " + path("a.json"), "B is required");
}

// A file of bench --share with one case of these samples, on this machine.
json shared(const std::vector<double>& samples, const std::string& cpu = "a CPU") {
  json j = json::parse(report({{"x", {samples[0], samples[0], samples[0]}}}));
  j["format"] = "flash3-bench-share/1";
  j["machine"] = {{"cpu", cpu}, {"cores", 2}};
  j["versions"] = {{"compiler", "gcc 12.2.0"}};
  j["results"][0]["samples_ms"] = samples;
  return j;
}

TEST_F(CliCompare, TakesTheIntervalFromAllSamples) {
  std::vector<double> a, b;
  for (int i = 0; i < 30; ++i)
    a.push_back(2 + 0.01 * (i * i * 7 % 13 - 6)), b.push_back(a.back() / 2);
  const Outcome o = compare(shared(a).dump(), shared(b).dump());
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_EQ(words_of(o.out, "x ").back(), "faster") << o.out;
  // The ends of the middle 80 % are the median here: the interval has come from the samples.
  EXPECT_LT(words_of(o.out, "x ").at(6), "2.000") << o.out;
  EXPECT_EQ(o.out.find("different"), std::string::npos) << o.out;
}

TEST_F(CliCompare, TellsOtherMachinesAndVersions) {
  json other = shared(std::vector<double>(12, 1), "another CPU");
  other["versions"]["compiler"] = "clang 19.1.7";
  const Outcome o = compare(shared(std::vector<double>(12, 1)).dump(), other.dump());
  EXPECT_NE(o.out.find("different machines: cpu (a CPU, another CPU)\n"), std::string::npos)
      << o.out;
  EXPECT_NE(o.out.find("different versions: compiler (gcc 12.2.0, clang 19.1.7)\n"),
            std::string::npos)
      << o.out;
}

TEST_F(CliCompare, TakesWhatBenchShares) {
  const std::string bench =
      "bench --backend cpu --samples 12 --sample-ms 0 --case fp32/b1/q9/k9/h2/d8/full --share ";
  ASSERT_EQ(flash3(bench + path("1.json")).exit_code, 0);
  const json j = json::parse(slurp(path("1.json")));
  EXPECT_EQ(j["format"], "flash3-bench-share/1");
  EXPECT_FALSE(j["metadata"].contains("host"))
      << "a user who shares a file may not want to share that";
  for (const char* name : {"cpu", "cores", "memory_gib", "system"})
    EXPECT_TRUE(j["machine"].contains(name)) << name;
  for (const char* name : {"flash3", "commit", "compiler", "libc"})
    EXPECT_TRUE(j["versions"].contains(name)) << name;
  for (const char* when : {"before", "after"}) EXPECT_TRUE(j[when].contains("load_average"));
  const json& row = j["results"][0];
  std::vector<double> samples = row["samples_ms"];
  ASSERT_EQ(samples.size(), 12u);
  std::sort(samples.begin(), samples.end());
  EXPECT_NEAR(samples[6], row["median_ms"], 1e-12);
  const Outcome o = flash3("compare " + path("1.json") + " " + path("1.json"));
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(
      o.out.find("B has 1.000 of A's speed, the geometric mean of 1 cases: 0 faster, 0 slower"),
      std::string::npos)
      << o.out;
}

TEST_F(CliCompare, RefusesOtherFormatsOfShare) {
  json newer = shared(std::vector<double>(12, 1)), broken = newer;
  newer["format"] = "flash3-bench-share/2";
  broken["results"][0]["samples_ms"][3] = "fast";
  const std::string good = report({{"x", {1, 1, 1}}});
  expect_refused(
      good, newer.dump(), "b.json",
      "its format is \"flash3-bench-share/2\" and this flash3 reads flash3-bench-share/1");
  expect_refused(broken.dump(), good, "a.json", "samples_ms that are not times");
  expect_refused(good, R"({"points": []})", "b.json", "has no metadata and results");
  expect_usage_error("bench --sustained 1 --share " + path("s.json"),
                     "--sustained excludes --share");
  expect_usage_error("bench --list --share " + path("s.json"), "excludes");
}

}  // namespace
}  // namespace flash3::cli
