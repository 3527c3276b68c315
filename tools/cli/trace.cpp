// SPDX-License-Identifier: Apache-2.0
#include "cli/trace.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>

#include "cases/internals.hpp"
#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/timing.hpp"
#include "cli/workbench.hpp"
#include "device/bench_kernels.hpp"
#include "device/device.hpp"

namespace flash3::cli {
namespace {

using device::Role;

struct PhaseName {
  device::Phase phase;
  const char* name;
  const char* number;  // what a stamp's number counts; null: it has none
};
constexpr PhaseName kPhaseNames[] = {
    {device::Phase::kEnd, "end", nullptr},
    {device::Phase::kWaitTile, "wait for work", nullptr},
    {device::Phase::kWriteTile, "find work tile", nullptr},
    {device::Phase::kBeginTile, "begin work tile", nullptr},
    {device::Phase::kWaitRoom, "wait for room", "key_tile"},
    {device::Phase::kLoad, "load", "key_tile"},
    {device::Phase::kWaitV, "wait for V", "key_tile"},
    {device::Phase::kTranspose, "transpose", "key_tile"},
    {device::Phase::kWaitQ, "wait for Q", nullptr},
    {device::Phase::kWaitK, "wait for K", "key_tile"},
    {device::Phase::kWaitTurn, "wait for turn", "key_tile"},
    {device::Phase::kIssue, "issue products", "key_tile"},
    {device::Phase::kWaitScores, "wait for scores", "key_tile"},
    {device::Phase::kMaximum, "softmax: maxima", "key_tile"},
    {device::Phase::kWaitOutput, "wait for output", "key_tile"},
    {device::Phase::kExponentiate, "softmax: exponentials", "key_tile"},
    {device::Phase::kLastProduct, "last product", nullptr},
    {device::Phase::kStore, "store", nullptr},
};
static_assert(std::size(kPhaseNames) == device::kPhases);

constexpr bool in_order() {
  for (int i = 0; i < device::kPhases; ++i)
    if (int(kPhaseNames[i].phase) != i) return false;
  return true;
}
static_assert(in_order());

const PhaseName& named(device::Phase phase) { return kPhaseNames[int(phase)]; }

bool waits(device::Phase phase) { return std::string(named(phase).name).starts_with("wait"); }

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

std::string name_of(device::Phase phase) { return named(phase).name; }

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
    const auto phase = device::Phase(from.what & 0xff);
    if (phase != device::Phase::kEnd && int(phase) < device::kPhases)
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
        text += format(kRow, name_of(role), name_of(device::Phase(i)), times[i],
                       format("{:.2f}", us[i]), format("{:.3f}", us[i] / times[i]),
                       format("{:.1f}%", all > 0 ? 100 * us[i] / all : 0));
  }
  return text;
}

namespace {

// flash3 trace: what each role of one block of a forward kernel does, and when.

constexpr int kSamples = 11;
constexpr double kSampleSeconds = 0.01;

cases::Case case_to_trace(const TraceOptions& options) {
  const cases::Case c = parse_case(options.id);
  if (c.backward) throw UsageError(to_id(c) + " is a backward call but trace is for forward calls");
  if (const std::string reason = unavailable(FLASH3_BACKEND_HOPPER); !reason.empty())
    throw std::runtime_error("trace needs a Hopper GPU: " + reason);
  device::require_bench_kernels("trace");
  return c;
}

// Throws unless the traced kernel writes what the library's writes, bit for bit.
void check_output(const device::TracedCall& call, const flash3_tensor& out, cases::Memory& memory) {
  const size_t bytes = size_t(cases::span_of(out)) * size_t(dtype_size(out.dtype));
  const auto expected = memory.allocate(bytes);
  memory.fill(out.data, std::byte{0xFF}, bytes);
  call.library();
  memory.copy(expected.get(), out.data, bytes);
  memory.fill(out.data, std::byte{0xFF}, bytes);
  call.traced();
  if (!memory.equal(expected.get(), out.data, bytes))
    throw std::runtime_error(call.kernel + ": with stamps its output is another");
}

}  // namespace

int trace(const TraceOptions& options) {
  const cases::Case c = case_to_trace(options);
  std::optional<OutputFile> output;
  if (!options.output.empty()) output.emplace(options.output);
  Workbench workbench(FLASH3_BACKEND_HOPPER, 0);
  const PreparedCase prepared = workbench.prepare(c);
  cases::Memory& memory = workbench.memory();
  const device::TracedCall call = device::traced_call(prepared.forward, options.block, memory);
  check_output(call, prepared.forward.out, memory);
  const std::vector<Timing> timings =
      measure_interleaved(memory, {call.library, call.traced}, kSamples, kSampleSeconds, [] {});
  call.traced();
  const device::Trace recorded = call.read();

  uint32_t left_out = 0;
  for (const device::RoleTrace& role : recorded.roles) left_out += role.left_out;
  Json about = metadata(FLASH3_BACKEND_HOPPER);
  about["case"] = options.id;
  about["kernel"] = call.kernel;
  about["kernel_of_the_library"] = call.planned;
  about["block"] = recorded.block;
  about["blocks"] = call.blocks;
  about["multiprocessor"] = recorded.multiprocessor;
  about["clock_mhz"] = 1e-6 * recorded.clock_hz;
  about["ms"] = 1e3 * timings[0].median;
  about["ms_traced"] = 1e3 * timings[1].median;
  about["stamps_left_out"] = left_out;

  print("{}; flash3 {} ({}); {}\n", describe(FLASH3_BACKEND_HOPPER), flash3_version(),
        build_commit(), options.id);
  print(
      "{}, block {} of {} on multiprocessor {}, {:.0f} MHz; {:.4f} ms, with stamps {:.4f} ms "
      "({:+.1f}%)\n",
      call.kernel, recorded.block, call.blocks, recorded.multiprocessor, 1e-6 * recorded.clock_hz,
      1e3 * timings[0].median, 1e3 * timings[1].median,
      100 * (timings[1].median / timings[0].median - 1));
  if (call.kernel != call.planned)
    print("the library takes {} for this call, which is not traced\n", call.planned);
  if (left_out > 0)
    print("{} stamps had no room: the timeline ends before the block does\n", left_out);
  print("{}", trace_table(recorded));
  if (output) output->finish(chrome_trace(recorded, about));
  return 0;
}

}  // namespace flash3::cli
