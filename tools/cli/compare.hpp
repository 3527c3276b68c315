// SPDX-License-Identifier: Apache-2.0
// Two files of flash3 bench --json or --share beside each other. Whether a difference is one is
// told by an interval of the ratio: of --share from all samples, otherwise from their middle 80 %.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace flash3::cli {

using Json = nlohmann::ordered_json;

// ---- how much faster one run is than another, and how sure that is ----

struct Interval {
  double low, high;
};

// Fewer samples say too little about what else they could have been.
inline constexpr size_t kLeastSamples = 10;

// The 99 % interval of median(a) / median(b), by a bootstrap: both are drawn again 2000 times from
// their samples, in blocks of the cube root of their number, since neighbours resemble each other.
// The same samples have the same interval on every machine. Both need kLeastSamples.
Interval median_ratio_interval(const std::vector<double>& a, const std::vector<double>& b);

// ---- files ----

// Milliseconds of a case's samples.
struct CaseTime {
  double median, p10, p90;
  std::vector<double> samples{};  // of bench --share

  double noise() const { return (p90 - p10) / median; }  // the width of the middle 80 %
};

// What a run is described by: its name, and what the file has for it.
using Facts = std::vector<std::pair<std::string, std::string>>;

struct BenchFile {
  std::string path, commit, device, date;
  std::vector<std::pair<std::string, CaseTime>> times;  // by case id, as they stand in the file
  Facts machine, versions;
};

enum class Change { kFaster, kSlower, kSame };  // from A to B

struct ComparedCase {
  std::string id;
  CaseTime a, b;
  Interval interval;  // of what the ratio could be

  double ratio() const { return a.median / b.median; }  // of B's speed to A's
  // kSame where the interval holds 1, or the medians are apart by no more than the noise of either
  // or kSmallest: what changes between two runs of one program is seen by the samples of neither.
  Change change() const;
  static constexpr double kSmallest = 0.01;
};

struct Comparison {
  std::vector<ComparedCase> cases;
  std::vector<std::string> only_a, only_b;

  double mean_ratio() const;  // geometric
  size_t count(Change change) const;
  // Whether the mean has so much of A's speed, and no case less that is no noise.
  bool reaches(double least) const;
};

// Throws UsageError with the path if the file is not what flash3 bench writes.
BenchFile read_bench_file(const std::string& path);
// What the ratio of speeds could be: with enough samples on both sides by median_ratio_interval(),
// otherwise from the ends of the middle 80 % of both.
Interval ratio_interval(const CaseTime& a, const CaseTime& b);
// What both files tell, and tell otherwise: "device (this, that)".
std::vector<std::string> differences(const Facts& a, const Facts& b);
// Throws UsageError if no case is in both.
Comparison compare_files(const BenchFile& a, const BenchFile& b);

}  // namespace flash3::cli
