// flash3 bench: how fast cases run, on N(0, 1) data.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cases/runner.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/progress.hpp"
#include "cli/suites.hpp"
#include "cli/timing.hpp"
#include "device/monitor.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using Json = nlohmann::ordered_json;

// Dense 16-bit tensor-core throughput of a Hopper SM.
constexpr double kFlopsPerClockPerSm = 4096;

struct Result {
  Case c;
  std::string kernel;
  Timing timing;
  double naive_seconds = 0;  // 0: not timed
  device::Reading reading;
  double peak = 0;  // FLOP/s at the measured clock, or at the highest without one; 0: unknown
  double tflops() const { return flops(c) / timing.median * 1e-12; }
  double gbps() const { return tensor_bytes(c) / timing.median * 1e-9; }
  double percent_of_peak() const { return peak > 0 ? 1e14 * tflops() / peak : 0; }
  // Width of the middle 80 % of the samples.
  double spread_percent() const { return 100 * (timing.p90 - timing.p10) / timing.median; }
};

// Normal values by dtype and seed; grown when a case needs more.
class NormalData {
 public:
  const void* get(flash3_dtype dtype, uint64_t seed, int64_t count) {
    for (Entry& e : entries_)
      if (e.dtype == dtype && e.seed == seed && e.count >= count) return e.bytes.data();
    Entry e{dtype, seed, count, {}};
    e.bytes.resize(static_cast<size_t>(count * cases::element_size(dtype)));
    cases::fill_normal(e.bytes.data(), dtype, count, seed);
    entries_.push_back(std::move(e));
    return entries_.back().bytes.data();
  }

 private:
  struct Entry {
    flash3_dtype dtype;
    uint64_t seed;
    int64_t count;
    std::vector<std::byte> bytes;
  };
  std::vector<Entry> entries_;
};

class Bench {
 public:
  Bench(const BenchOptions& options, flash3_backend backend)
      : options_(options), backend_(backend), memory_(make_memory(backend)), gpu_(gpu_of(backend)) {
    if (gpu_) monitor_ = std::make_unique<device::Monitor>(gpu_->pci_bus_id);
  }

  Result run(const Case& c) {
    Result r;
    r.c = c;
    auto params = cases::make_question(c);
    params.backend = backend_;
    params.num_threads = options_.threads;
    params.stream = memory_->stream();
    check(flash3_forward_supported(&params));
    size_t workspace_bytes = 0;
    check(flash3_forward_workspace(&params, &workspace_bytes));
    r.kernel = value_of(explanation(params), "kernel");

    std::vector<std::shared_ptr<void>> buffers;
    uint64_t seed = 3 * c.seed;
    for (flash3_tensor* t : {&params.q, &params.k, &params.v}) {
      t->data = add_buffer(*t, &buffers);
      const int64_t count = cases::span_of(*t);
      memory_->copy_in(t->data, data_.get(c.dtype, seed++, count),
                       static_cast<size_t>(count * cases::element_size(c.dtype)));
    }
    params.out.data = add_buffer(params.out, &buffers);
    if (c.want_lse) params.lse.data = add_buffer(params.lse, &buffers);
    buffers.push_back(memory_->allocate(workspace_bytes));
    params.workspace = workspace_bytes > 0 ? buffers.back().get() : nullptr;
    params.workspace_size = workspace_bytes;

    r.timing = measure(
        *memory_, [&] { check(flash3_forward(&params)); }, options_.samples,
        1e-3 * options_.sample_ms,
        [&] {
          if (monitor_) monitor_->start();
        });
    if (monitor_) r.reading = monitor_->stop();
    if (gpu_ && c.dtype != FLASH3_FLOAT32)
      r.peak = (r.reading.samples > 0 ? r.reading.clock_hz : gpu_->max_clock_hz) * gpu_->sms *
               kFlopsPerClockPerSm;
    if (options_.naive) r.naive_seconds = time_naive(params);
    return r;
  }

 private:
  void* add_buffer(const flash3_tensor& t, std::vector<std::shared_ptr<void>>* buffers) {
    buffers->push_back(
        memory_->allocate(static_cast<size_t>(cases::span_of(t) * cases::element_size(t.dtype))));
    return buffers->back().get();
  }

  double time_naive(const flash3_forward_params& params) {
    ForwardProblem problem;
    const Status status = make_forward_problem(&params, Pointers::kRequired, &problem);
    if (!status.ok()) throw std::runtime_error(status.message());
    return measure(
               *memory_, [&] { attention_naive(problem, options_.threads); },
               std::min(options_.samples, 5), 1e-3 * options_.sample_ms)
        .median;
  }

  const BenchOptions& options_;
  flash3_backend backend_;
  std::unique_ptr<cases::Memory> memory_;
  std::optional<device::Gpu> gpu_;
  std::unique_ptr<device::Monitor> monitor_;
  NormalData data_;
};

Json to_json(const Result& r) {
  Json j;
  j["case"] = to_id(r.c);
  j["kernel"] = r.kernel;
  j["median_ms"] = 1e3 * r.timing.median;
  j["p10_ms"] = 1e3 * r.timing.p10;
  j["p90_ms"] = 1e3 * r.timing.p90;
  j["samples"] = r.timing.samples;
  j["calls_per_sample"] = r.timing.calls_per_sample;
  j["tflops"] = r.tflops();
  j["gbps"] = r.gbps();
  if (r.peak > 0) j["percent_of_peak"] = r.percent_of_peak();
  if (r.naive_seconds > 0) {
    j["naive_ms"] = 1e3 * r.naive_seconds;
    j["speedup_over_naive"] = r.naive_seconds / r.timing.median;
  }
  if (r.reading.samples > 0) {
    j["sm_clock_mhz"] = 1e-6 * r.reading.clock_hz;
    j["min_sm_clock_mhz"] = 1e-6 * r.reading.min_clock_hz;
    j["watts"] = r.reading.watts;
    j["max_watts"] = r.reading.max_watts;
    j["celsius"] = r.reading.celsius;
    j["throttled"] = r.reading.throttled;
  }
  return j;
}

std::string header(bool gpu, bool naive) {
  std::string line =
      fmt::format("{:<40} {:>10} {:>9} {:>8} {:>8}", "case", "ms", "TFLOP/s", "spread", "GB/s");
  if (gpu) line += fmt::format(" {:>7} {:>6} {:>6}", "% peak", "MHz", "W");
  if (naive) line += fmt::format(" {:>10}", "vs naive");
  return line;
}

std::string row(const Result& r, bool gpu) {
  std::string line = fmt::format("{:<40} {:>10.4f} {:>9.3f} {:>7.1f}% {:>8.1f}", to_id(r.c),
                                 1e3 * r.timing.median, r.tflops(), r.spread_percent(), r.gbps());
  if (gpu) {
    line +=
        r.peak > 0 ? fmt::format(" {:>6.1f}%", r.percent_of_peak()) : fmt::format(" {:>7}", "-");
    line += r.reading.samples > 0 ? fmt::format(" {:>6.0f} {:>6.0f}{}", 1e-6 * r.reading.clock_hz,
                                                r.reading.watts, r.reading.throttled ? "*" : "")
                                  : fmt::format(" {:>6} {:>6}", "-", "-");
  }
  if (r.naive_seconds > 0) line += fmt::format(" {:>9.2f}x", r.naive_seconds / r.timing.median);
  return line;
}

std::string csv(const Json& results) {
  // Columns in the order of the fullest row; a field that a row lacks stays empty.
  std::vector<std::string> columns;
  for (const Json& r : results)
    for (const auto& [name, value] : r.items())
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
  std::string text = fmt::format("{}\n", fmt::join(columns, ","));
  for (const Json& r : results) {
    for (size_t i = 0; i < columns.size(); ++i) {
      if (i > 0) text += ',';
      if (!r.contains(columns[i])) continue;
      const Json& value = r[columns[i]];
      text += value.is_string() ? '"' + value.get<std::string>() + '"' : value.dump();
    }
    text += '\n';
  }
  return text;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw std::runtime_error(path + ": cannot be written");
}

}  // namespace

int bench(const BenchOptions& options) {
  const flash3_backend backend = resolve_backend(options.backend);
  if (options.naive && backend != FLASH3_BACKEND_CPU)
    throw UsageError("--naive is for the CPU backend");
  std::vector<Case> list;
  for (const std::string& id : options.cases) list.push_back(parse_case(id));
  if (list.empty()) list = bench_suite(options.suite, backend);
  keep_matching(options.filters, &list);

  const Json about = metadata(backend);
  const bool gpu = backend == FLASH3_BACKEND_HOPPER;
  fmt::print("{}; flash3 {} ({}); median of {} samples of {} ms\n{}\n", describe(backend),
             flash3_version(), build_commit(), options.samples, options.sample_ms,
             header(gpu, options.naive));
  Bench bench(options, backend);
  Progress progress("bench", list.size());
  Json results = Json::array();
  bool failed = false;
  bool throttled = false;
  for (const Case& c : list) {
    progress.announce(to_id(c));
    try {
      const Result r = bench.run(c);
      results.push_back(to_json(r));
      throttled |= r.reading.throttled;
      progress.print(row(r, gpu));
    } catch (const UsageError&) {
      throw;
    } catch (const std::runtime_error& e) {  // the other cases may still run
      failed = true;
      progress.print(fmt::format("{:<40} {}", to_id(c), e.what()));
    }
    progress.step();
  }
  if (throttled) progress.print("* held below its clock by power or heat");
  if (!options.json_file.empty())
    write_file(options.json_file, Json{{"metadata", about}, {"results", results}}.dump(2) + "\n");
  if (!options.csv_file.empty()) write_file(options.csv_file, csv(results));
  return failed ? kExitFailure : 0;
}

}  // namespace flash3::cli
