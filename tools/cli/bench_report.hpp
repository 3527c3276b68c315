// SPDX-License-Identifier: Apache-2.0
// What flash3 bench has measured, as a table, JSON and CSV.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "cli/timing.hpp"
#include "device/bench_kernels.hpp"
#include "device/monitor.hpp"

namespace flash3::cli {

using Json = nlohmann::ordered_json;

// How fast a plain copy is.
struct CopyResult {
  size_t bytes = 0;
  double gbps = 0;  // read and written
};

struct BenchResult {
  cases::Case c;
  std::string kernel;
  size_t workspace_bytes = 0;
  Timing timing;                             // without `sustained`
  std::optional<SustainedTiming> sustained;  // instead of `timing`
  device::Reading burst_reading;             // clock of the burst; `reading` is of the steady half
  int buffers = 0;                    // that k and v of a call on a KV cache lie in; 0: it is none
  double copy_gbps = 0;               // of this run; 0: not measured
  double naive_seconds = 0;           // 0: not timed
  std::optional<cases::Case> beside;  // timed interleaved with `c`; `reading` is of both
  Timing beside_timing;
  double quantize_seconds = 0;  // to make the tensors of `c` from those of `beside`; 0: not timed
  device::Reading reading;
  double peak = 0;  // FLOP/s at the measured clock, or at the highest without one; 0: unknown
  double ceiling_tflops = 0;         // of this run, for this dtype; 0: not measured
  double beside_ceiling_tflops = 0;  // likewise, for that of `beside`

  double seconds() const { return sustained ? sustained->seconds_a_call : timing.median; }
  double tflops() const;
  double gbps() const;
  double percent_of_copy() const;     // 0: unknown
  double percent_of_peak() const;     // 0: unknown
  double percent_of_ceiling() const;  // 0: unknown
  double pj_per_flop() const;         // 0: unknown
  double keys_per_query() const;      // visible ones, the mean
  double spread_percent() const;      // width of the middle 80 % of the samples
  double beside_tflops() const;       // 0: there is none
  double beside_gbps() const;         // 0: there is none
  double ratio() const;               // of the TFLOP/s to those of `beside`; 0: there is none
};

// The columns that a run has.
struct BenchTable {
  bool gpu = false, naive = false, ceiling = false, sustained = false;
  bool keys = false;      // time against the keys that a query sees
  bool mask = false;      // how much a mask as data lets through, and by which blocks
  bool memory = false;    // bytes of workspace, and what the score matrix would have taken
  bool quantize = false;  // time of flash3_quantize
  bool ragged = false;    // how many sequences, and how long
  bool cache = false;     // microseconds, and the share of what a copy reaches
  size_t case_width = 40, beside_width = 0;  // 0: no case has another beside it

  std::string header() const;
  std::string row(const BenchResult& r) const;
  // A line for a case that failed.
  std::string failure(const cases::Case& c, const std::string& why) const;
};

std::string ceiling_line(const device::CeilingResult& c);
std::string copy_line(const CopyResult& c);

Json to_json(const BenchResult& r);
// What a case asks for, before anything runs: sequences, tokens, FLOPs, bytes.
Json work_of(const cases::Case& c);
// when: "before" or "after" the cases, or "alone".
Json to_json(const device::CeilingResult& c, const std::string& when);
Json to_json(const CopyResult& c);
std::string to_csv(const Json& results);

// Clock, watts and heat; nothing if there is no reading.
void add_reading(const device::Reading& r, Json* j);

// What flash3 bench --share writes beside the results: enough to compare them with a run elsewhere.

inline constexpr char kShareFormat[] = "flash3-bench-share/1";

// Clock, watts and load of the machine while nothing is measured: of the GPU where there is a
// monitor, of the CPU without. What the machine does not tell is left out.
Json machine_state(device::Monitor* monitor);

// The report without results. metadata: of the run; the host's name is left out of it.
Json shared_report(const Json& metadata, const Json& before, const Json& after);

// What to_json() made of r, and the milliseconds of each of its samples, as they were taken.
Json with_samples(Json j, const BenchResult& r);

// Energy that the CPU's packages have used, as the kernel counts it below `folder`; nothing if it
// does not, or not for this user.
std::optional<double> package_joules(const std::filesystem::path& folder);

}  // namespace flash3::cli
