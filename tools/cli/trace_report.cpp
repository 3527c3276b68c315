// SPDX-License-Identifier: Apache-2.0
#include "cli/trace_report.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "cli/format.hpp"

namespace flash3::cli {
namespace {

using device::Phase;
using device::Role;

struct PhaseName {
  Phase phase;
  const char* name;
  const char* number;  // what a stamp's number counts; null: it has none
};
constexpr PhaseName kPhaseNames[] = {
    {Phase::kEnd, "end", nullptr},
    {Phase::kWaitTile, "wait for work", nullptr},
    {Phase::kWriteTile, "find work tile", nullptr},
    {Phase::kBeginTile, "begin work tile", nullptr},
    {Phase::kWaitRoom, "wait for room", "key_tile"},
    {Phase::kLoad, "load", "key_tile"},
    {Phase::kWaitV, "wait for V", "key_tile"},
    {Phase::kTranspose, "transpose", "key_tile"},
    {Phase::kWaitQ, "wait for Q", nullptr},
    {Phase::kWaitK, "wait for K", "key_tile"},
    {Phase::kWaitTurn, "wait for turn", "key_tile"},
    {Phase::kIssue, "issue products", "key_tile"},
    {Phase::kWaitScores, "wait for scores", "key_tile"},
    {Phase::kMaximum, "softmax: maxima", "key_tile"},
    {Phase::kWaitOutput, "wait for output", "key_tile"},
    {Phase::kExponentiate, "softmax: exponentials", "key_tile"},
    {Phase::kLastProduct, "last product", nullptr},
    {Phase::kStore, "store", nullptr},
};
static_assert(std::size(kPhaseNames) == device::kPhases);

constexpr bool in_order() {
  for (int i = 0; i < device::kPhases; ++i)
    if (int(kPhaseNames[i].phase) != i) return false;
  return true;
}
static_assert(in_order());

const PhaseName& named(Phase phase) { return kPhaseNames[int(phase)]; }

bool waits(Phase phase) { return std::string(named(phase).name).starts_with("wait"); }

Json event_of(const TraceSpan& span, const device::RoleTrace& role, double origin, int list) {
  // Nanoseconds are finer than the clock.
  const auto rounded = [](double us) { return std::round(us * 1e3) / 1e3; };
  Json event{{"ph", "X"},
             {"pid", 0},
             {"tid", list},
             {"name", name_of(span.phase)},
             {"cat", waits(span.phase) ? "wait" : "work"},
             {"ts", rounded(span.begin_us - origin)},
             {"dur", rounded(span.end_us - span.begin_us)}};
  if (const char* number = named(span.phase).number)
    event["args"] = {{role.role == Role::kLoadQ ? "warpgroup" : number, span.number}};
  return event;
}

Json name_event(const char* what, int list, const std::string& name) {
  return {{"ph", "M"}, {"pid", 0}, {"tid", list}, {"name", what}, {"args", {{"name", name}}}};
}

}  // namespace

std::string name_of(Phase phase) { return named(phase).name; }

std::string name_of(const device::RoleTrace& role) {
  switch (role.role) {
    case Role::kScheduler: return "scheduler";
    case Role::kLoadQ: return "Q loader";
    case Role::kLoadK: return "K loader";
    case Role::kLoadV: return "V loader";
    case Role::kTransposeV: return "V transposer";
    case Role::kConsumer: break;
  }
  return format("consumer {}", role.warpgroup);
}

std::vector<TraceSpan> spans_of(const device::RoleTrace& role, const device::Trace& trace) {
  std::vector<TraceSpan> spans;
  if (role.stamps.empty()) return spans;
  const double us_a_clock = 1e6 / trace.clock_hz;
  // Stamps hold the low half of the clock: differences of neighbours are right all the same. A role
  // may have begun before the first clock.
  int64_t clock = int32_t(role.stamps[0].clock - trace.first_clock);
  for (size_t i = 1; i < role.stamps.size(); ++i) {
    const device::Stamp &from = role.stamps[i - 1], &to = role.stamps[i];
    const int64_t next = clock + uint32_t(to.clock - from.clock);
    const auto phase = Phase(from.what & 0xff);
    if (phase != Phase::kEnd && int(phase) < device::kPhases)
      spans.push_back(
          {phase, int(from.what >> 8), double(clock) * us_a_clock, double(next) * us_a_clock});
    clock = next;
  }
  return spans;
}

std::string chrome_trace(const device::Trace& trace, const Json& about) {
  std::vector<std::vector<TraceSpan>> spans;
  double origin = std::numeric_limits<double>::infinity();
  for (const device::RoleTrace& role : trace.roles) {
    spans.push_back(spans_of(role, trace));
    if (!spans.back().empty()) origin = std::min(origin, spans.back().front().begin_us);
  }
  std::vector<std::string> events{
      name_event("process_name", 0,
                 format("block {} on multiprocessor {}", trace.block, trace.multiprocessor))
          .dump()};
  for (int list = 0; list < int(trace.roles.size()); ++list) {
    const device::RoleTrace& role = trace.roles[list];
    events.push_back(name_event("thread_name", list, name_of(role)).dump());
    for (const TraceSpan& span : spans[list])
      events.push_back(event_of(span, role, origin, list).dump());
  }
  // An event a line: files are read and compared by people too.
  return format(
      "{{\n\"displayTimeUnit\": \"ns\",\n\"otherData\": {},\n\"traceEvents\": [\n{}\n]\n}}\n",
      about.dump(2), join(events, ",\n"));
}

std::string trace_table(const device::Trace& trace) {
  constexpr const char* kRow = "{:<12} {:<22} {:>7} {:>10} {:>9} {:>7}\n";
  std::string text = format(kRow, "role", "phase", "times", "us", "us each", "share");
  for (const device::RoleTrace& role : trace.roles) {
    int times[device::kPhases] = {};
    double us[device::kPhases] = {}, all = 0;
    for (const TraceSpan& span : spans_of(role, trace)) {
      ++times[int(span.phase)];
      us[int(span.phase)] += span.end_us - span.begin_us;
      all += span.end_us - span.begin_us;
    }
    for (int i = 0; i < device::kPhases; ++i)
      if (times[i] > 0)
        text += format(kRow, name_of(role), name_of(Phase(i)), times[i], format("{:.2f}", us[i]),
                       format("{:.3f}", us[i] / times[i]),
                       format("{:.1f}%", all > 0 ? 100 * us[i] / all : 0));
  }
  return text;
}

}  // namespace flash3::cli
