// SPDX-License-Identifier: Apache-2.0
#include "cli/compare.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <stdexcept>
#include <tuple>

#include "cases/text.hpp"
#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/json_file.hpp"

namespace flash3::cli {
namespace {

constexpr size_t kDraws = 2000;
constexpr double kOutside = 0.01;  // of the draws, half of them on each side

// The mean of the two in the middle of an even number.
double median(std::vector<double>* values) {
  const auto middle = values->begin() + std::ptrdiff_t(values->size() / 2);
  std::nth_element(values->begin(), middle, values->end());
  if (values->size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values->begin(), middle)) / 2;
}

// As many values as there are samples, by blocks that begin anywhere and go round the end.
void draw(const std::vector<double>& samples, std::mt19937_64& random, std::vector<double>* drawn) {
  const size_t count = samples.size();
  const size_t block = size_t(std::ceil(std::cbrt(double(count))));
  drawn->clear();
  while (drawn->size() < count) {
    const size_t start = size_t(random() % count);
    for (size_t i = 0; i < block && drawn->size() < count; ++i)
      drawn->push_back(samples[(start + i) % count]);
  }
}

}  // namespace

Interval median_ratio_interval(const std::vector<double>& a, const std::vector<double>& b) {
  if (std::min(a.size(), b.size()) < kLeastSamples)
    throw std::invalid_argument("a bootstrap of too few samples");
  std::mt19937_64 random(1);  // NOLINT(bugprone-random-generator-seed): the same draws each time
  std::vector<double> ratios, drawn_a, drawn_b;
  for (size_t i = 0; i < kDraws; ++i) {
    draw(a, random, &drawn_a);
    draw(b, random, &drawn_b);
    ratios.push_back(median(&drawn_a) / median(&drawn_b));
  }
  std::sort(ratios.begin(), ratios.end());
  const size_t cut = size_t(kOutside / 2 * kDraws);
  return {ratios[cut], ratios[kDraws - 1 - cut]};
}

namespace {

using cases::printable;

// The limit for a file: the bootstrap draws each sample thousands of times.
constexpr size_t kMostSamples = 1'000'000;

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw UsageError(printable(path) + ": " + why +
                   "; flash3 compare reads what flash3 bench --json and --share write");
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

Json read_report(const std::string& path) {
  Json report = read_json(path);
  if (!report.is_object() || !report.contains("metadata") || !report["metadata"].is_object() ||
      !report.contains("results") || !report["results"].is_array())
    refuse(path, "has no metadata and results");
  if (report.contains("format") && report["format"] != kShareFormat)
    refuse(path, format("its format is {} and this flash3 reads {}",
                        json_text(report["format"], -1), kShareFormat));
  return report;
}

std::vector<double> samples_of(const Json& result, const std::string& path) {
  const auto at = result.find("samples_ms");
  if (at == result.end()) return {};
  std::vector<double> samples;
  for (const Json& sample : *at) {
    if (!sample.is_number() || !(sample.get<double>() > 0))
      refuse(path, "a case has samples_ms that are not times");
    samples.push_back(sample.get<double>());
  }
  return samples;
}

Facts facts_of(const Json& report, const char* part) {
  Facts facts;
  const auto at = report.find(part);
  if (at == report.end() || !at->is_object()) return facts;
  for (const auto& [name, value] : at->items())
    facts.emplace_back(name, value.is_string() ? value.get<std::string>() : json_text(value, -1));
  return facts;
}

const char* word(Change change) {
  return change == Change::kFaster   ? "faster"
         : change == Change::kSlower ? "slower"
                                     : "within noise";
}

}  // namespace

BenchFile read_bench_file(const std::string& path) {
  const Json report = read_report(path);
  const Json& about = report["metadata"];
  BenchFile file{
      path, text_at(about, "commit"),    text_at(about, "device"),    text_at(about, "date"),
      {},   facts_of(report, "machine"), facts_of(report, "versions")};
  size_t samples = 0;
  for (const Json& result : report["results"]) {
    if (!result.is_object() || !result.contains("case") || !result["case"].is_string())
      refuse(path, "a result has no case");
    const std::string id = result["case"];
    const CaseTime time{number(result, "median_ms", path), number(result, "p10_ms", path),
                        number(result, "p90_ms", path), samples_of(result, path)};
    file.times.emplace_back(id, time);
    samples += time.samples.size();
    if (samples > kMostSamples) refuse(path, format("has more than {} samples", kMostSamples));
  }
  const NameIndex index(file.times, [](const auto& e) -> const std::string& { return e.first; });
  if (index.repeated < file.times.size())
    refuse(path, printable(file.times[index.repeated].first) + " occurs twice");
  return file;
}

Interval ratio_interval(const CaseTime& a, const CaseTime& b) {
  if (std::min(a.samples.size(), b.samples.size()) >= kLeastSamples)
    return median_ratio_interval(a.samples, b.samples);
  return {a.p10 / b.p90, a.p90 / b.p10};
}

Change ComparedCase::change() const {
  const double apart = std::max(ratio(), 1 / ratio()) - 1;
  if (apart <= std::max({a.noise(), b.noise(), kSmallest})) return Change::kSame;
  if (interval.low > 1) return Change::kFaster;
  return interval.high < 1 ? Change::kSlower : Change::kSame;
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

std::vector<std::string> differences(const Facts& a, const Facts& b) {
  std::vector<std::string> found;
  const std::map<std::string, std::string> of_b(b.begin(), b.end());
  for (const auto& [name, value] : a)
    if (const auto other = of_b.find(name); other != of_b.end() && value != other->second)
      found.push_back(format("{} ({}, {})", name, value, other->second));
  return found;
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
    made.cases.push_back({id, time, at->second, ratio_interval(time, at->second)});
    of_b.erase(at);
  }
  for (const auto& [id, time] : b.times)
    if (of_b.contains(id)) made.only_b.push_back(id);
  if (made.cases.empty())
    throw UsageError(
        format("{} and {} have no case in common", printable(a.path), printable(b.path)));
  return made;
}

int compare(const CompareOptions& options) {
  const BenchFile a = read_bench_file(options.a), b = read_bench_file(options.b);
  const Comparison all = compare_files(a, b);
  size_t width = 4;
  for (const ComparedCase& c : all.cases) width = std::max(width, c.id.size());
  for (const auto& [name, file] : {std::pair{"A", &a}, std::pair{"B", &b}})
    print("{}: {}, commit {}, {}, {}\n", name, printable(file->path), printable(file->commit),
          printable(file->device), printable(file->date));
  if (a.device != b.device) print("A and B ran on different devices\n");
  for (const auto& [what, of_a, of_b] : {std::tuple{"machines", &a.machine, &b.machine},
                                         std::tuple{"versions", &a.versions, &b.versions}})
    if (const auto found = differences(*of_a, *of_b); !found.empty())
      print("different {}: {}\n", what, printable(join(found, "; ")));
  print("\n{:<{}} {:>12} {:>7} {:>12} {:>7} {:>8} {:>15}  B is\n", "case", width, "A, ms", "noise",
        "B, ms", "noise", "speed", "interval");
  for (const ComparedCase& c : all.cases) {
    print("{:<{}} {:>12.5f} {:>6.1f}% {:>12.5f} {:>6.1f}% {:>8.3f} {:>6.3f} … {:>6.3f}  {}\n",
          printable(c.id), width, c.a.median, 100 * c.a.noise(), c.b.median, 100 * c.b.noise(),
          c.ratio(), c.interval.low, c.interval.high, word(c.change()));
  }
  for (const auto& [name, ids] : {std::pair{"A", &all.only_a}, std::pair{"B", &all.only_b}})
    if (!ids->empty()) print("in {} alone: {}\n", name, printable(join(*ids, " ")));
  print(
      "\nB has {:.3f} of A's speed, the geometric mean of {} cases: {} faster, {} slower, {} "
      "within noise\n",
      all.mean_ratio(), all.cases.size(), all.count(Change::kFaster), all.count(Change::kSlower),
      all.count(Change::kSame));
  return all.reaches(options.least) ? 0 : kExitFailure;
}

}  // namespace flash3::cli
