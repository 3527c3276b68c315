// SPDX-License-Identifier: Apache-2.0
// flash3 bench: how fast cases run, on N(0, 1) data, and what the GPU could do at most.
#include <algorithm>
#include <cmath>
#include <map>

#include "cases/internals.hpp"
#include "cases/kernel_input.hpp"
#include "cases/mask.hpp"
#include "cases/text.hpp"
#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/json_file.hpp"
#include "cli/progress.hpp"
#include "cli/workbench.hpp"
#include "device/bench_kernels.hpp"
#include "device/device.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::cli {
namespace {

using cases::Case;

constexpr double kCeilingSeconds = 1.6;
// Ceilings before and after the cases that lie further apart make every share doubtful.
constexpr double kDriftPercent = 2;

// What a case's products run in.
flash3_dtype products_of(const Case& c) { return c.fp8 ? FLASH3_FLOAT8_E4M3 : c.dtype; }

flash3_dtype dtype_of(const BenchOptions& options) {
  if (options.dtype.empty()) return FLASH3_BFLOAT16;
  if (!options.cases.empty())
    throw UsageError("--dtype " + cases::printable(options.dtype) +
                     " is for a suite and --ceiling; a --case names its own");
  const auto dtype = cases::parse_dtype(options.dtype);
  if (!dtype)
    throw UsageError("dtype " + cases::in_quotes(options.dtype) +
                     " is not one of fp16, bf16, fp32");
  if (dtype == FLASH3_FLOAT8_E4M3 && !options.suite.empty())
    throw UsageError("--dtype e4m3 is for --ceiling alone; of --suite " +
                     cases::printable(options.suite) + " it is fp16, bf16 or fp32");
  return *dtype;
}

// What to run on; what --ceiling and the others demand is checked here, before anything runs.
flash3_backend backend_of(const BenchOptions& options) {
  if (options.ceiling && options.backend == "cpu")
    throw UsageError("--ceiling needs a Hopper GPU, and --backend is cpu");
  if (options.ceiling) {
    if (const std::string reason = unavailable(FLASH3_BACKEND_HOPPER); !reason.empty())
      throw std::runtime_error("--ceiling needs a Hopper GPU: " + reason);
    device::require_bench_kernels("--ceiling");
  }
  if (options.list) return backend_named(options.backend);
  const flash3_backend backend = resolve_backend(options.backend);
  if (options.naive && backend != FLASH3_BACKEND_CPU)
    throw UsageError("--naive is for the CPU backend");
  if (options.naive && options.sustained > 0)
    throw UsageError("--naive and --sustained do not go together");
  return backend;
}

std::string suite_of(const BenchOptions& options) {
  return options.suite.empty() ? "quick" : options.suite;
}

// Empty: only the ceiling is asked for.
std::vector<BenchPoint> points_of(const BenchOptions& options, flash3_backend backend) {
  const flash3_dtype dtype = dtype_of(options);
  std::vector<BenchPoint> list;
  for (const std::string& id : options.cases) list.push_back({parse_case(id), {}});
  if (list.empty() && options.ceiling && options.suite.empty()) {
    if (!options.filters.empty() || !options.csv_file.empty() || !options.share_file.empty())
      throw UsageError("--filter, --csv and --share are for cases; --ceiling alone runs none");
    if (dtype == FLASH3_FLOAT32) throw UsageError("--ceiling is for fp16, bf16 and e4m3, not fp32");
    return list;
  }
  if (list.empty() && dtype == FLASH3_FLOAT8_E4M3)
    throw UsageError("--dtype e4m3 is for --ceiling; --suite fp8 has e4m3 cases");
  if (list.empty()) list = bench_suite(suite_of(options), backend, dtype);
  const auto set_pass = [&](Case* c) {
    c->backward |= options.backward;
    if (c->backward && c->has_cache())
      throw UsageError(to_id(*c) + " is a call on a KV cache, which has no backward");
    if (options.deterministic && !c->backward)
      throw UsageError("--deterministic is for backward cases, and " + to_id(*c) +
                       " is a forward one: add --backward");
    c->deterministic |= options.deterministic;
  };
  // Of a suite that has both, the gradients.
  const auto is_backward = [](const BenchPoint& p) { return p.c.backward; };
  if (options.backward && std::ranges::any_of(list, is_backward))
    std::erase_if(list, [&](const BenchPoint& p) { return !is_backward(p); });
  for (BenchPoint& point : list) {
    set_pass(&point.c);
    if (options.sustained > 0) point.beside.reset();  // each case alone
    if (point.beside) set_pass(&*point.beside);
  }
  std::erase_if(list, [&](const BenchPoint& p) { return !matches(options.filters, p.c); });
  if (list.empty()) throw UsageError("no case matches the filter");
  return list;
}

class Bench {
 public:
  Bench(const BenchOptions& options, flash3_backend backend)
      : options_(options), workbench_(backend, options.threads) {}

  BenchResult run(const BenchPoint& point) {
    const Case& c = point.c;
    PreparedCase prepared = workbench_.prepare(c);
    std::optional<PreparedCase> beside;
    if (point.beside) beside = workbench_.prepare(*point.beside);
    device::Monitor* const monitor = workbench_.monitor();
    cases::Memory& memory = workbench_.memory();
    // FP8 beside 16 bits: the same tensors, as flash3_quantize makes them.
    std::optional<cases::Fp8Input> fp8;
    if (beside && c.dtype == FLASH3_FLOAT8_E4M3 && beside->c.dtype != c.dtype) {
      fp8.emplace(memory, beside->forward, cases::Scales::kBlock, /*rotate=*/true);
      check(fp8->quantize());
      fp8->apply(&prepared.forward);
    }
    const double sample_seconds = 1e-3 * options_.sample_ms;
    BenchResult r;
    r.c = c;
    r.kernel = prepared.kernel;
    r.workspace_bytes = prepared.workspace_bytes;
    r.buffers = c.reads_cache() ? prepared.calls : 0;
    r.copy_gbps = c.reads_cache() ? copy_gbps_ : 0;
    if (options_.sustained > 0) {
      r.sustained = measure_sustained(
          memory, [&] { prepared.enqueue(); }, options_.sustained, sample_seconds,
          [&](Phase phase) {
            if (!monitor) return;
            if (phase == Phase::kSettling)
              r.burst_reading = monitor->stop();
            else
              monitor->start();
          });
      r.sustained->burst = per_call(r.sustained->burst, prepared.calls);
      r.sustained->seconds_a_call /= prepared.calls;
    } else {
      std::vector<std::function<void()>> calls{[&] { prepared.enqueue(); }};
      if (beside) calls.push_back([&] { beside->enqueue(); });
      const std::vector<Timing> timings =
          measure_interleaved(memory, calls, options_.samples, sample_seconds, [&] {
            if (monitor) monitor->start();
          });
      r.timing = per_call(timings.front(), prepared.calls);
      r.beside = point.beside;
      if (beside) r.beside_timing = per_call(timings.back(), beside->calls);
      if (fp8) r.quantize_seconds = time_quantize(*fp8);
    }
    if (monitor) r.reading = monitor->stop();
    const auto& gpu = workbench_.gpu();
    if (gpu && c.dtype != FLASH3_FLOAT32)
      r.peak = (r.reading.samples > 0 ? r.reading.clock_hz : gpu->max_clock_hz) * gpu->sms *
               device::flops_per_clock_per_sm(products_of(c));
    r.ceiling_tflops = ceiling_of(c);
    if (r.beside) r.beside_ceiling_tflops = ceiling_of(*r.beside);
    if (options_.naive) r.naive_seconds = time_naive(prepared);
    return r;
  }

  // Once for each dtype. What is measured before the cases is what they are held against.
  std::vector<device::CeilingResult> measure_ceilings(const std::vector<flash3_dtype>& dtypes,
                                                      double seconds, bool reference) {
    std::vector<device::CeilingResult> results;
    for (const flash3_dtype dtype : dtypes) {
      results.push_back(device::measure_ceiling(dtype, options_.ceiling_dim, seconds,
                                                *workbench_.gpu(), *workbench_.monitor(),
                                                workbench_.memory()));
      if (reference) ceilings_[dtype] = results.back().tflops();
    }
    return results;
  }

  double ceiling(flash3_dtype dtype) const { return ceilings_.at(dtype); }

  Json state() { return machine_state(workbench_.monitor()); }

  // What the bytes of calls on a KV cache are held against.
  CopyResult measure_copy() {
    constexpr int kMostSamples = 5;
    copy_gbps_ = 1e-9 * workbench_.measure_copy(std::min(options_.samples, kMostSamples),
                                                1e-3 * options_.sample_ms);
    return {Workbench::kCopyBytes, copy_gbps_};
  }

 private:
  // 0: not measured.
  double ceiling_of(const Case& c) const {
    const auto found = ceilings_.find(products_of(c));
    return found != ceilings_.end() ? found->second : 0;
  }

  double time_quantize(const cases::Fp8Input& fp8) {
    return measure(
               workbench_.memory(), [&] { check(fp8.quantize()); }, options_.samples,
               1e-3 * options_.sample_ms)
        .median;
  }

  double time_naive(const PreparedCase& prepared) {
    ForwardProblem forward;
    BackwardProblem backward;
    const Status status =
        prepared.c.backward
            ? make_backward_problem(&prepared.backward, Pointers::kRequired, &backward)
            : make_forward_problem(&prepared.forward, Pointers::kRequired, &forward);
    if (!status.ok()) throw std::runtime_error(status.message());
    const MaskPairs* const mask = prepared.mask ? &prepared.mask->pairs() : nullptr;
    const auto run = [&] {
      if (prepared.c.backward)
        attention_backward_naive(backward, options_.threads, mask);
      else
        attention_naive(forward, options_.threads, mask);
    };
    return measure(workbench_.memory(), run, std::min(options_.samples, 5),
                   1e-3 * options_.sample_ms)
        .median;
  }

  const BenchOptions& options_;
  Workbench workbench_;
  std::map<flash3_dtype, double> ceilings_;  // TFLOP/s
  double copy_gbps_ = 0;
};

std::vector<flash3_dtype> ceiling_dtypes(const BenchOptions& options,
                                         const std::vector<BenchPoint>& list) {
  if (list.empty()) return {dtype_of(options)};
  std::vector<flash3_dtype> dtypes;
  for (const flash3_dtype dtype : {FLASH3_BFLOAT16, FLASH3_FLOAT16, FLASH3_FLOAT8_E4M3})
    if (std::any_of(list.begin(), list.end(), [&](const BenchPoint& p) {
          return products_of(p.c) == dtype || (p.beside && products_of(*p.beside) == dtype);
        }))
      dtypes.push_back(dtype);
  return dtypes;
}

BenchTable table_of(const BenchOptions& options, flash3_backend backend,
                    const std::vector<BenchPoint>& list) {
  BenchTable table;
  table.gpu = backend == FLASH3_BACKEND_HOPPER;
  table.naive = options.naive;
  table.ceiling = options.ceiling;
  table.sustained = options.sustained > 0;
  for (const auto& [c, beside] : list) {
    table.keys |= c.window && !c.mask.given();
    table.mask |= c.mask.given();
    table.memory |= c.backward;
    table.ragged |= c.is_ragged();
    table.cache |= c.reads_cache();
    table.quantize |= c.dtype == FLASH3_FLOAT8_E4M3 && beside;
    table.case_width = std::max(table.case_width, to_id(c).size());
    if (beside) table.beside_width = std::max(table.beside_width, to_id(*beside).size());
  }
  return table;
}

std::string how(const BenchOptions& options) {
  if (options.sustained > 0)
    return format(
        "TFLOP/s of the first {} samples of {} ms after a pause of {} s, and of the "
        "second half of {} s without a pause",
        SustainedTiming::kBurstSamples, options.sample_ms, SustainedTiming::kPause,
        options.sustained);
  return format("median of {} samples of {} ms", options.samples, options.sample_ms);
}

// What the cases ask for, without running any.
int list_points(const BenchOptions& options, const std::vector<BenchPoint>& list) {
  std::optional<OutputFile> file;
  if (!options.json_file.empty()) file.emplace(options.json_file);
  Json all = Json::array();
  for (const auto& [c, beside] : list) {
    Json j = work_of(c);
    print("{}: {} sequences, {} tokens, cost/token {:.1f}, {:.3f} GFLOP, {:.3f} MB\n", to_id(c),
          c.batch, queries(c), cost_per_token(c), 1e-9 * seen_flops(c), 1e-6 * tensor_bytes(c));
    if (beside) {
      j["beside"] = work_of(*beside);
      print("  beside {}\n", to_id(*beside));
    }
    all.push_back(std::move(j));
  }
  if (file) file->finish(report_text(Json{{"cases", all}}));
  return 0;
}

// What a run prints and writes.
class Report {
 public:
  // Opens the files that were asked for.
  Report(const BenchOptions& options, const BenchTable& table, size_t cases)
      : options_(options), table_(table), progress_("bench", cases) {
    const std::pair<std::optional<OutputFile>*, const std::string*> files[] = {
        {&json_, &options.json_file}, {&csv_, &options.csv_file}, {&share_, &options.share_file}};
    for (const auto& [file, path] : files) {
      for (const auto& [other, taken] : files)
        if (*other && is_same_file(*path, *taken))
          throw UsageError(cases::printable(*path) + " is named for two of the results' files");
      if (!path->empty()) file->emplace(*path);
    }
  }

  void run_ceilings(Bench& bench, const std::vector<flash3_dtype>& dtypes, double seconds,
                    const std::string& when) {
    progress_.announce("ceiling");
    for (const device::CeilingResult& c :
         bench.measure_ceilings(dtypes, seconds, when != "after")) {
      ceilings_.push_back(to_json(c, when));
      throttled_ |= c.reading.throttled;
      progress_.print(ceiling_line(c));
      const double drift = 100 * (c.tflops() / bench.ceiling(c.dtype) - 1);
      if (std::abs(drift) > kDriftPercent)
        progress_.print(
            format("the ceiling has moved by {:+.1f} % since the beginning: the "
                   "shares are uncertain by as much",
                   drift));
    }
  }

  void run_copy(Bench& bench) {
    progress_.announce("copy");
    copy_ = bench.measure_copy();
    progress_.print(copy_line(*copy_));
  }

  void run_points(Bench& bench, const std::vector<BenchPoint>& list) {
    if (share_) before_ = bench.state();
    progress_.print(table_.header());
    for (const BenchPoint& point : list) {
      if (stop_requested()) stop();
      if (stopped_) break;
      progress_.announce(to_id(point.c));
      try {
        const BenchResult r = bench.run(point);
        results_.push_back(to_json(r));
        if (share_) shared_.push_back(with_samples(results_.back(), r));
        throttled_ |= r.reading.throttled;
        progress_.print(table_.row(r));
      } catch (const UsageError&) {
        throw;
      } catch (const Stopped&) {
        stop();
        break;
      } catch (const std::exception& e) {  // the other cases may still run
        failed_ = true;
        progress_.print(table_.failure(point.c, sentence_of(e)));
      }
      progress_.step();
    }
    if (share_) after_ = bench.state();
  }

  // The run ends before all is measured.
  void stop() { stopped_ = true; }

  // Writes the files that were asked for; returns the exit code. A run that was stopped leaves what
  // it has by then, and says so, but nothing in the place of an older file if it has nothing.
  int finish(Json about) {
    if (stopped_) {
      if (results_.empty() && ceilings_.empty()) return kExitFailure;
      about["interrupted"] = true;
    }
    if (throttled_) progress_.print("* held below its clock by power or heat");
    if (json_) {
      Json all{{"metadata", about}};
      if (options_.ceiling) all["ceiling"] = ceilings_;
      if (copy_) all["copy"] = to_json(*copy_);
      all["results"] = results_;
      json_->finish(report_text(all));
    }
    if (csv_) csv_->finish(to_csv(results_));
    if (share_) {
      Json all = shared_report(about, before_, after_);
      if (options_.ceiling) all["ceiling"] = ceilings_;
      if (copy_) all["copy"] = to_json(*copy_);
      all["results"] = shared_;
      share_->finish(report_text(all));
    }
    return failed_ ? kExitFailure : 0;
  }

 private:
  const BenchOptions& options_;
  const BenchTable& table_;
  Progress progress_;
  std::optional<OutputFile> json_, csv_, share_;
  Json ceilings_ = Json::array(), results_ = Json::array(), shared_ = Json::array();
  Json before_, after_;  // what the machine did when no case ran
  std::optional<CopyResult> copy_;
  bool failed_ = false, throttled_ = false, stopped_ = false;
};

}  // namespace

int bench(const BenchOptions& options) {
  if (options.ablation) return bench_ablation(options);
  const flash3_backend backend = backend_of(options);
  const std::vector<BenchPoint> list = points_of(options, backend);
  if (options.list) return list_points(options, list);
  const BenchTable table = table_of(options, backend, list);
  Json about = metadata(backend);
  if (!list.empty() && options.cases.empty()) about["suite"] = suite_of(options);
  if (!list.empty()) about["how"] = how(options);
  print("{}; flash3 {} ({}){}{}\n", describe(backend), flash3_version(), build_commit(),
        list.empty() ? "" : "; ", list.empty() ? "" : how(options));

  Bench bench(options, backend);
  Report report(options, table, list.size());
  const auto run_ceilings = [&](const std::string& when) {
    const double seconds =
        list.empty() && options.sustained > 0 ? options.sustained : kCeilingSeconds;
    report.run_ceilings(bench, ceiling_dtypes(options, list), seconds, when);
  };
  try {
    if (options.ceiling) run_ceilings(list.empty() ? "alone" : "before");
    if (table.cache) report.run_copy(bench);
    if (!list.empty()) report.run_points(bench, list);
    if (options.ceiling && !list.empty()) run_ceilings("after");
  } catch (const Stopped&) {
    report.stop();
  }
  return report.finish(about);
}

}  // namespace flash3::cli
