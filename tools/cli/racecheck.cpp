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

// Of a thread's line, which begins with `start`: whether it names this function.
bool is_at(std::string_view report, std::string_view start, std::string_view function) {
  const size_t at = report.find(start);
  if (at == report.npos) return false;
  return report.substr(at, report.find('\n', at) - at).find(function) != std::string_view::npos;
}

// Whether the read names no function but an FP8 kernel: Element::kE4m3 is 2.
bool is_in_fp8_kernel(std::string_view report) {
  return is_at(report, "Read Thread", " at void flash3::cuda::sm90::forward_kernel<") &&
         is_at(report, "Read Thread", ", (flash3::cuda::Element)2>>(");
}

bool is_of_scales(std::string_view report) {
  const bool in_operands = is_at(report, "Read Thread", "flash3::cuda::sm90::OperandsFp8<");
  return report.find("Potential WAR hazard detected at __shared__") != report.npos &&
         ((in_operands && is_at(report, "Read Thread", ">::v_scale(const ")) ||
          (in_operands && is_at(report, "Read Thread", ">::begin_key_tile<")) ||
          is_in_fp8_kernel(report)) &&
         (is_at(report, "Write Thread", " at flash3::cuda::copy_async(float *, ") ||
          is_at(report, "Write Thread", " at flash3::cuda::sm90::copy_scale(float *, "));
}

bool is_of_latent_rows(std::string_view report) {
  return report.find("Potential RAW hazard detected at __shared__") != report.npos &&
         (is_at(report, "Read Thread", "::take_max(int, flash3::cuda::sm90::LatentSoftmax<") ||
          is_at(report, "Read Thread", "::end_sums(flash3::cuda::sm90::LatentSoftmax<")) &&
         (is_at(report, "Write Thread", " at void flash3::cuda::sm90::latent_kernel<") ||
          is_at(report, "Write Thread", " at flash3::cuda::sm90::LatentSoftmax<"));
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
      if (is_of_scales(report) || is_of_latent_rows(report)) {
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
