// SPDX-License-Identifier: Apache-2.0
// What flash3 compare calls a difference, and what flash3 bench --share reads of the machine.
#include "cli/compare.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>

#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/files.hpp"
#include "cli/json_file.hpp"

namespace flash3::cli {
namespace {

namespace fs = std::filesystem;

// So many samples of about this many milliseconds; `spread` is the standard deviation.
std::vector<double> normal_samples(uint64_t seed, size_t count, double mean, double spread) {
  std::mt19937_64 random(seed);
  const auto uniform = [&] { return (double(random() >> 11) + 0.5) * 0x1p-53; };
  std::vector<double> samples;
  for (size_t i = 0; i < count; ++i) {
    const double radius = std::sqrt(-2 * std::log(uniform())), angle = 2 * M_PI * uniform();
    samples.push_back(mean * (1 + spread * radius * std::cos(angle)));
  }
  return samples;
}

CaseTime time_of(std::vector<double> samples) {
  std::vector<double> sorted = samples;
  std::sort(sorted.begin(), sorted.end());
  const auto at = [&](double q) {
    return sorted[size_t(std::lround(q * double(sorted.size() - 1)))];
  };
  return {at(0.5), at(0.1), at(0.9), std::move(samples)};
}

ComparedCase compared(std::vector<double> a, std::vector<double> b) {
  CaseTime of_a = time_of(std::move(a)), of_b = time_of(std::move(b));
  const Interval interval = ratio_interval(of_a, of_b);
  return {"x", std::move(of_a), std::move(of_b), interval};
}

TEST(MedianRatio, TheIntervalHoldsTheTruthAboutAsOftenAsItSays) {
  int missed = 0;
  constexpr int kTrials = 100;
  for (uint64_t i = 0; i < kTrials; ++i) {
    const auto [low, high] = median_ratio_interval(normal_samples(2 * i, 30, 3, 0.02),
                                                   normal_samples(2 * i + 1, 30, 2, 0.02));
    EXPECT_LT(high - low, 0.15);
    missed += low > 1.5 || high < 1.5;
  }
  EXPECT_LE(missed, 6);
}

TEST(MedianRatio, IsTheSameEachTimeAndNarrowerWithMoreSamples) {
  const auto a = normal_samples(1, 30, 1, 0.05), b = normal_samples(2, 30, 1, 0.05);
  const Interval once = median_ratio_interval(a, b), again = median_ratio_interval(a, b);
  EXPECT_EQ(once.low, again.low);
  EXPECT_EQ(once.high, again.high);
  const Interval many =
      median_ratio_interval(normal_samples(1, 1000, 1, 0.05), normal_samples(2, 1000, 1, 0.05));
  EXPECT_LT(many.high - many.low, (once.high - once.low) / 2);
}

TEST(MedianRatio, OutliersDoNotMoveIt) {
  auto a = normal_samples(1, 30, 1, 0.01);
  const auto b = normal_samples(2, 30, 1, 0.01);
  a[4] = a[20] = 50;
  const auto [low, high] = median_ratio_interval(a, b);
  EXPECT_GT(low, 0.97);
  EXPECT_LT(high, 1.03);
}

TEST(MedianRatio, NeedsSamples) {
  const std::vector<double> few(kLeastSamples - 1, 1), enough(kLeastSamples, 1);
  EXPECT_THROW(median_ratio_interval(few, enough), std::invalid_argument);
  EXPECT_THROW(median_ratio_interval(enough, few), std::invalid_argument);
  const Interval equal = median_ratio_interval(enough, enough);
  EXPECT_EQ(equal.low, 1);
  EXPECT_EQ(equal.high, 1);
}

TEST(Compare, WithFewSamplesTheMiddleOfThemIsTheInterval) {
  const Interval interval = ratio_interval({2, 1, 4, {2, 1, 4}}, {1, 0.5, 2, {1, 0.5, 2}});
  EXPECT_EQ(interval.low, 0.5);
  EXPECT_EQ(interval.high, 8);
}

TEST(Compare, ADifferenceIsLargerThanTheNoiseOfBoth) {
  const auto quiet = normal_samples(1, 30, 1, 0.002), loud = normal_samples(2, 30, 1.05, 0.05);
  EXPECT_EQ(compared(quiet, normal_samples(3, 30, 1.05, 0.002)).change(), Change::kSlower);
  EXPECT_EQ(compared(normal_samples(3, 30, 1.05, 0.002), quiet).change(), Change::kFaster);
  // 5 % apart, and the samples of one spread further; on whichever side it stands.
  EXPECT_EQ(compared(quiet, loud).change(), Change::kSame);
  EXPECT_EQ(compared(loud, quiet).change(), Change::kSame);
  // Less than 1 % is none, however sure.
  const ComparedCase near = compared(std::vector<double>(30, 1), std::vector<double>(30, 1.008));
  EXPECT_LT(near.interval.high, 1);
  EXPECT_EQ(near.change(), Change::kSame);
}

TEST(Compare, DifferencesAreOfWhatBothTell) {
  EXPECT_EQ(differences({{"cpu", "x"}, {"cores", "2"}, {"gone", "1"}},
                        {{"cores", "4"}, {"cpu", "x"}, {"new", "1"}}),
            (std::vector<std::string>{"cores (2, 4)"}));
}

// What a file costs to read is bounded by its bytes, its levels, and the comparisons of names.
class JsonFile : public testing::Test {
 protected:
  void TearDown() override { fs::remove(path_); }
  std::string error(const std::string& text, const JsonLimits& limits = {}) {
    std::ofstream(path_) << text;
    try {
      read_json(path_, limits, &comparisons_);
    } catch (const FileError& e) {
      return std::string(e.what()).substr(path_.size() + 2);
    }
    return "";
  }
  static std::string object_of(int names) {
    std::string text = "{";
    for (int i = 0; i < names; ++i) text += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
    return text + "}";
  }
  const std::string path_ = fs::temp_directory_path() / ("flash3_json_" + std::to_string(getpid()));
  uint64_t comparisons_ = 0;
};

TEST_F(JsonFile, BytesAndLevelsAreBounded) {
  EXPECT_EQ(error("[1]"), "");
  EXPECT_EQ(error("[12]", {.bytes = 3}), "has 4 bytes, and 3 is the most for JSON");
  EXPECT_EQ(error("[[1]]", {.depth = 2}), "");
  EXPECT_EQ(error("[[[1", {.depth = 2}), "has more than 2 levels of arrays and objects");
  EXPECT_EQ(error(R"({"a":{"a":[1)", {.depth = 2}), "has more than 2 levels of arrays and objects");
  EXPECT_EQ(error("").find("is not JSON: "), 0u);
  EXPECT_EQ(error("[\"" + std::string(100'000, 'x') + "\x1b").find("is not JSON: "), 0u);
  EXPECT_LT(error("[\"" + std::string(100'000, 'x') + "\x1b").size(), 300u);
}

TEST_F(JsonFile, ComparisonsAreBounded) {
  EXPECT_EQ(error(object_of(1000)), "");
  EXPECT_EQ(comparisons_, 1000u * 999 / 2);
  EXPECT_EQ(error("[" + object_of(9) + "," + object_of(5) + "]"), "");
  EXPECT_EQ(comparisons_, 36u + 10);
  EXPECT_EQ(error(object_of(7000)), "has objects of too many names");
}

// The bootstrap draws each sample 2000 times.
TEST_F(JsonFile, SamplesAreBounded) {
  std::string samples = "1";
  for (int i = 1; i <= 1'000'000; ++i) samples += ",1";
  std::ofstream(path_) << R"({"metadata":{},"results":[{"case":"x","median_ms":1,"p10_ms":1,)"
                       << R"("p90_ms":1,"samples_ms":[)" << samples << "]}]}";
  try {
    read_bench_file(path_);
    ADD_FAILURE() << "no exception";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("has more than 1000000 samples"), std::string::npos);
  }
}

TEST(Names, ARepeatedOneIsFoundInOrder) {
  for (const size_t count : {1000, 40'000}) {
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) names.push_back("case " + std::to_string(i * 7919 % count));
    const auto itself = [](const std::string& name) -> const std::string& { return name; };
    EXPECT_EQ(NameIndex(names, itself).repeated, names.size());
    names[count / 3] = names[count / 2];
    const NameIndex index(names, itself);
    ASSERT_LT(index.repeated, names.size());
    EXPECT_EQ(names[index.repeated], names[count / 2]);
    EXPECT_LE(double(index.comparisons), 3 * double(count) * std::log2(double(count)));
  }
}

class Powercap : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("flash3_powercap_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  void zone(const std::string& folder, const std::string& name, const std::string& energy) {
    fs::create_directories(folder_ / folder);
    std::ofstream(folder_ / folder / "name") << name << "\n";
    if (!energy.empty()) std::ofstream(folder_ / folder / "energy_uj") << energy << "\n";
  }
  fs::path folder_;
};

TEST_F(Powercap, PackagesAreAddedUp) {
  EXPECT_FALSE(package_joules(folder_ / "none"));
  EXPECT_FALSE(package_joules(folder_));
  zone("intel-rapl:0", "package-0", "1500000");
  zone("intel-rapl:1", "package-1", "500000");
  zone("intel-rapl:0:0", "core", "9000000");
  ASSERT_TRUE(package_joules(folder_));
  EXPECT_NEAR(*package_joules(folder_), 2, 1e-12);
}

TEST_F(Powercap, OnePackageThatCannotBeReadLeavesNoSum) {
  zone("intel-rapl:0", "package-0", "1500000");
  zone("intel-rapl:1", "package-1", "");
  EXPECT_FALSE(package_joules(folder_));
}

TEST(Share, SamplesStandBesideTheResult) {
  BenchResult r;
  r.timing.all = {0.002, 0.001};
  EXPECT_EQ(with_samples(Json{{"case", "x"}}, r).dump(), R"({"case":"x","samples_ms":[2.0,1.0]})");
  r.beside = r.c;
  r.beside_timing.all = {0.003};
  EXPECT_EQ(with_samples(Json{}, r).dump(),
            R"({"samples_ms":[2.0,1.0],"beside_samples_ms":[3.0]})");
}

TEST(Share, TheReportHasNoHostName) {
  const Json all = shared_report({{"host", "secret"}, {"device", "a GPU"}, {"driver", "580"}},
                                 {{"watts", 90}}, {{"watts", 300}});
  EXPECT_EQ(all.dump().find("secret"), std::string::npos);
  EXPECT_EQ(all["machine"]["device"], "a GPU");
  EXPECT_EQ(all["versions"]["driver"], "580");
  EXPECT_EQ(all["before"]["watts"], 90);
  EXPECT_EQ(all["after"]["watts"], 300);
}

TEST(Share, SamplesOfManyCallsAreOfOne) {
  const Timing t = per_call({8, 6, 10, 2, 1, {6, 10}}, 4);
  EXPECT_EQ(t.all, (std::vector<double>{1.5, 2.5}));
}

}  // namespace
}  // namespace flash3::cli
