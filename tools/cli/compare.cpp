// SPDX-License-Identifier: Apache-2.0
#include "cli/compare.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>

#include "cli/commands.hpp"
#include "cli/format.hpp"

namespace flash3::cli {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw UsageError(path + ": " + why + "; flash3 compare reads what flash3 bench --json writes");
}

double number(const Json& result, const char* name, const std::string& path) {
  const auto at = result.find(name);
  if (at == result.end() || !at->is_number() || !(at->get<double>() > 0))
    refuse(path, format("a case has no {}, as with --sustained", name));
  return at->get<double>();
}

std::string text_at(const Json& j, const char* name) {
  const auto at = j.find(name);
  return at != j.end() && at->is_string() ? at->get<std::string>() : "unknown";
}

Json read_json(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw UsageError(path + ": cannot be read");
  Json report = Json::parse(file, nullptr, false);
  if (report.is_discarded()) refuse(path, "is no JSON");
  if (!report.is_object() || !report.contains("metadata") || !report["metadata"].is_object() ||
      !report.contains("results") || !report["results"].is_array())
    refuse(path, "has no metadata and results");
  return report;
}

const char* word(Change change) {
  return change == Change::kFaster ? "faster" : change == Change::kSlower ? "slower" : "same";
}

}  // namespace

BenchFile read_bench_file(const std::string& path) {
  const Json report = read_json(path);
  const Json& about = report["metadata"];
  BenchFile file{
      path, text_at(about, "commit"), text_at(about, "device"), text_at(about, "date"), {}};
  for (const Json& result : report["results"]) {
    if (!result.is_object() || !result.contains("case") || !result["case"].is_string())
      refuse(path, "a result has no case");
    const std::string id = result["case"];
    const CaseTime time{number(result, "median_ms", path), number(result, "p10_ms", path),
                        number(result, "p90_ms", path)};
    for (const auto& [other, ignored] : file.times)
      if (other == id) refuse(path, id + " occurs twice");
    file.times.emplace_back(id, time);
  }
  return file;
}

double ComparedCase::noise() const {
  return std::max((a.p90 - a.p10) / a.median, (b.p90 - b.p10) / b.median);
}

Change ComparedCase::change() const {
  if (b.p90 < a.p10) return Change::kFaster;
  return b.p10 > a.p90 ? Change::kSlower : Change::kSame;
}

double Comparison::mean_ratio() const {
  double sum = 0;
  for (const ComparedCase& c : cases) sum += std::log(c.ratio());
  return std::exp(sum / double(cases.size()));
}

size_t Comparison::count(Change change) const {
  return size_t(std::count_if(cases.begin(), cases.end(),
                              [&](const ComparedCase& c) { return c.change() == change; }));
}

bool Comparison::reaches(double least) const {
  return mean_ratio() >= least &&
         std::none_of(cases.begin(), cases.end(), [&](const ComparedCase& c) {
           return c.ratio() < least && c.change() == Change::kSlower;
         });
}

Comparison compare_files(const BenchFile& a, const BenchFile& b) {
  Comparison made;
  std::map<std::string, CaseTime> of_b(b.times.begin(), b.times.end());
  for (const auto& [id, time] : a.times) {
    const auto at = of_b.find(id);
    if (at == of_b.end()) {
      made.only_a.push_back(id);
      continue;
    }
    made.cases.push_back({id, time, at->second});
    of_b.erase(at);
  }
  for (const auto& [id, time] : b.times)
    if (of_b.contains(id)) made.only_b.push_back(id);
  if (made.cases.empty())
    throw UsageError(format("{} and {} have no case in common", a.path, b.path));
  return made;
}

int compare(const CompareOptions& options) {
  const BenchFile a = read_bench_file(options.a), b = read_bench_file(options.b);
  const Comparison all = compare_files(a, b);
  size_t width = 4;
  for (const ComparedCase& c : all.cases) width = std::max(width, c.id.size());
  for (const auto& [name, file] : {std::pair{"A", &a}, std::pair{"B", &b}})
    print("{}: {}, commit {}, {}, {}\n", name, file->path, file->commit, file->device, file->date);
  if (a.device != b.device) print("A and B ran on different devices\n");
  print("\n{:<{}} {:>12} {:>12} {:>8} {:>7}  B is\n", "case", width, "A, ms", "B, ms", "speed",
        "noise");
  for (const ComparedCase& c : all.cases)
    print("{:<{}} {:>12.5f} {:>12.5f} {:>8.3f} {:>6.1f}%  {}\n", c.id, width, c.a.median,
          c.b.median, c.ratio(), 100 * c.noise(), word(c.change()));
  for (const auto& [name, ids] : {std::pair{"A", &all.only_a}, std::pair{"B", &all.only_b}})
    if (!ids->empty()) print("in {} alone: {}\n", name, join(*ids, " "));
  print(
      "\nB has {:.3f} of A's speed, the geometric mean of {} cases: {} faster, {} slower, {} the "
      "same within the noise\n",
      all.mean_ratio(), all.cases.size(), all.count(Change::kFaster), all.count(Change::kSlower),
      all.count(Change::kSame));
  return all.reaches(options.least) ? 0 : kExitFailure;
}

}  // namespace flash3::cli
