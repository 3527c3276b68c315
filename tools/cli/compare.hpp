// SPDX-License-Identifier: Apache-2.0
// Two files of flash3 bench --json beside each other. Whether a difference is one is told by the
// samples: where the middle 80 % of both overlap, it is noise.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace flash3::cli {

using Json = nlohmann::ordered_json;

// Milliseconds of a case's samples.
struct CaseTime {
  double median, p10, p90;
};

struct BenchFile {
  std::string path, commit, device, date;
  std::vector<std::pair<std::string, CaseTime>> times;  // by case id, as they stand in the file
};

enum class Change { kFaster, kSlower, kSame };  // from A to B

struct ComparedCase {
  std::string id;
  CaseTime a, b;

  double ratio() const { return a.median / b.median; }  // of B's speed to A's
  double noise() const;  // width of the middle 80 % of the samples, the wider one, of the median
  Change change() const;
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
// Throws UsageError if no case is in both.
Comparison compare_files(const BenchFile& a, const BenchFile& b);

}  // namespace flash3::cli
