// SPDX-License-Identifier: Apache-2.0
#include "cli/racecheck.hpp"

#include <charconv>
#include <string_view>

namespace flash3::cli {
namespace {

constexpr std::string_view kHazard = "========= Error: ", kWarning = "========= Warning: ",
                           kSummary = "RACECHECK SUMMARY: ", kEnd = "========= \n";

// From `begin` to where the next report begins, or all of them end.
std::string_view report_at(std::string_view output, size_t begin) {
  const std::string_view rest = output.substr(begin);
  return rest.substr(0, rest.find(kEnd));
}

bool is_known(std::string_view report) {
  const auto has = [&](std::string_view text) { return report.find(text) != report.npos; };
  const auto line = [&](std::string_view start) {
    const size_t at = report.find(start);
    return at == report.npos ? std::string_view() : report.substr(at, report.find('\n', at) - at);
  };
  const auto is_at = [&](std::string_view start, std::string_view function) {
    return line(start).find(function) != std::string_view::npos;
  };
  return has("Potential WAR hazard detected at __shared__") &&
         (is_at("Read Thread", " at flash3::hopper::KeyScales<") ||
          is_at("Read Thread",
                " at void flash3::hopper::forward_kernel<flash3::hopper::Fp8Traits<")) &&
         (is_at("Write Thread", " at flash3::hopper::copy_async(float *, ") ||
          is_at("Write Thread", " at flash3::hopper::copy_scale(float *, "));
}

// What the summary counts; −1 without one.
int displayed_hazards(std::string_view output) {
  const size_t at = output.find(kSummary);
  if (at == output.npos) return -1;
  const char* const first = output.data() + at + kSummary.size();
  int count = -1;
  std::from_chars(first, output.data() + output.size(), count);
  return count;
}

}  // namespace

Races check_races(const std::string& output) {
  Races races;
  for (const std::string_view start : {kHazard, kWarning}) {
    for (size_t at = output.find(start); at != output.npos; at = output.find(start, at + 1)) {
      const std::string_view report = report_at(output, at);
      if (is_known(report)) {
        ++races.known;
      } else if (races.unknown.empty()) {
        races.unknown = report;
      }
    }
  }
  if (races.unknown.empty() && displayed_hazards(output) != races.known)
    races.unknown = "the summary counts other hazards than were printed";
  return races;
}

}  // namespace flash3::cli
