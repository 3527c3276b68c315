// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_report.hpp"

#include <gnu/libc-version.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>

#include "cases/mask.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/record_parts.hpp"
#include "device/device.hpp"

namespace flash3::cli {
namespace {

// A figure, or a dash where it is 0: unknown.
std::string cell(double value, int width, int digits, const char* unit = "") {
  return value > 0
             ? format(" {:>{}.{}f}{}", value, width - int(std::string(unit).size()), digits, unit)
             : format(" {:>{}}", "-", width);
}

// The share of the pairs that a mask lets through, and its blocks by how their pairs are told.
std::string mask_cells(const cases::Case& c) {
  const cases::MaskFacts* const facts = mask_facts(c);
  if (!facts) return format(" {:>8} {:>17}", "-", "-");
  return cell(100 * seen_share(c), 8, 2, "%") +
         format(" {:>17}", format("{}/{}/{}", facts->full, facts->ranges, facts->bits));
}

// A quote inside is written twice.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) result += c == '"' ? std::string(2, c) : std::string(1, c);
  return result + '"';
}

}  // namespace

void add_reading(const device::Reading& r, Json* j) {
  if (r.samples == 0) return;
  (*j)["sm_clock_mhz"] = 1e-6 * r.clock_hz;
  (*j)["min_sm_clock_mhz"] = 1e-6 * r.min_clock_hz;
  (*j)["watts"] = r.mean_watts();
  (*j)["watts_from"] = r.counted_watts > 0 ? "energy counter" : "samples of the power";
  (*j)["max_watts"] = r.max_watts;
  (*j)["celsius"] = r.celsius;
  (*j)["throttled"] = r.throttled;
}

double BenchResult::tflops() const { return seen_flops(c) / seconds() * 1e-12; }
double BenchResult::gbps() const { return tensor_bytes(c) / seconds() * 1e-9; }
double BenchResult::percent_of_copy() const { return copy_gbps > 0 ? 100 * gbps() / copy_gbps : 0; }
double BenchResult::percent_of_peak() const { return peak > 0 ? 1e14 * tflops() / peak : 0; }
double BenchResult::percent_of_ceiling() const {
  return ceiling_tflops > 0 ? 100 * tflops() / ceiling_tflops : 0;
}
double BenchResult::pj_per_flop() const {
  return reading.samples > 0 && tflops() > 0 && !beside ? reading.mean_watts() / tflops() : 0;
}
double BenchResult::keys_per_query() const {
  return queries(c) > 0 ? seen_pairs(c) / double(queries(c)) : 0;
}
double BenchResult::spread_percent() const {
  return 100 * (timing.p90 - timing.p10) / timing.median;
}
double BenchResult::beside_tflops() const {
  if (!beside) return 0;
  // Beside a mask every pair counts, not by the convention that halves a causal square.
  const double pairs = static_cast<double>(visible_pairs(*beside) * beside->heads_q);
  const double work =
      c.mask.given() ? 2 * pairs * static_cast<double>(products_of_pair(*beside)) : flops(*beside);
  return work / beside_timing.median * 1e-12;
}
double BenchResult::beside_gbps() const {
  return beside ? tensor_bytes(*beside) / beside_timing.median * 1e-9 : 0;
}
double BenchResult::ratio() const {
  return beside && tflops() > 0 ? tflops() / beside_tflops() : 0;
}

std::string BenchTable::header() const {
  std::string line = format("{:<{}}", "case", case_width);
  if (sustained) line += format(" {:>9}", "burst");
  if (!sustained) line += format(" {:>10}", cache ? "us" : "ms");
  line += format(" {:>9}", sustained ? "sustained" : "TFLOP/s");
  if (!sustained) line += format(" {:>8}", "spread");
  line += format(" {:>8}", "GB/s");
  if (cache) line += format(" {:>7}", "% copy");
  if (memory) line += format(" {:>13} {:>10}", "workspace MiB", "scores MiB");
  if (keys) line += format(" {:>10} {:>9}", "keys/query", "us/key");
  if (mask) line += format(" {:>8} {:>17}", "density", "full/ranges/bits");
  if (ragged) line += format(" {:>9} {:>10}", "sequences", "cost/token");
  if (gpu) line += format(" {:>7} {:>6} {:>7} {:>7}", "% peak", "MHz", "W", "pJ/FLOP");
  if (ceiling) line += format(" {:>9}", "% ceiling");
  if (naive) line += format(" {:>10}", "vs naive");
  if (quantize) line += format(" {:>11}", "quantize ms");
  if (beside_width > 0) line += format(" {:>6} {:<{}}", "ratio", "to", beside_width);
  return line;
}

std::string BenchTable::row(const BenchResult& r) const {
  std::string line = format("{:<{}}", to_id(r.c), case_width);
  if (r.sustained)
    line += cell(seen_flops(r.c) / r.sustained->burst.median * 1e-12, 9, 3);
  else
    line +=
        cache ? format(" {:>10.2f}", 1e6 * r.seconds()) : format(" {:>10.4f}", 1e3 * r.seconds());
  line += format(" {:>9.3f}", r.tflops());
  if (!r.sustained) line += format(" {:>7.1f}%", r.spread_percent());
  line += format(" {:>8.1f}", r.gbps());
  if (cache) line += cell(r.percent_of_copy(), 7, 1, "%");
  if (memory)
    line += format(" {:>13.2f} {:>10.1f}", double(r.workspace_bytes) / (1 << 20),
                   score_matrix_bytes(r.c) / (1 << 20));
  if (keys)
    line += cell(r.keys_per_query(), 10, 1) +
            cell(r.keys_per_query() > 0 ? 1e6 * r.seconds() / r.keys_per_query() : 0, 9, 4);
  if (mask) line += mask_cells(r.c);
  if (ragged) line += format(" {:>9}", r.c.batch) + cell(cost_per_token(r.c), 10, 1);
  if (gpu) {
    const bool read = r.reading.samples > 0;
    line += cell(r.percent_of_peak(), 7, 1, "%");
    line += cell(read ? 1e-6 * r.reading.clock_hz : 0, 6, 0);
    line += cell(read ? r.reading.mean_watts() : 0, 6, 0) + (r.reading.throttled ? "*" : " ");
    line += cell(r.pj_per_flop(), 7, 3);
  }
  if (ceiling) line += cell(r.percent_of_ceiling(), 9, 1, "%");
  if (r.naive_seconds > 0) line += format(" {:>9.2f}x", r.naive_seconds / r.seconds());
  if (quantize) line += cell(1e3 * r.quantize_seconds, 11, 4);
  if (beside_width > 0)
    line +=
        cell(r.ratio(), 6, 3) + format(" {:<{}}", r.beside ? to_id(*r.beside) : "-", beside_width);
  return line;
}

std::string BenchTable::failure(const cases::Case& c, const std::string& why) const {
  return format("{:<{}} {}", to_id(c), case_width, why);
}

std::string copy_line(const CopyResult& c) {
  return format("copy: {:.1f} GB/s, read and written, of {} MiB", c.gbps, c.bytes >> 20);
}

std::string ceiling_line(const device::CeilingResult& c) {
  const int reduced = c.dtype == FLASH3_FLOAT8_E4M3 ? 32 : 16;
  return format(
      "ceiling: {:.1f} TFLOP/s of {} WGMMA alone (m64n{}k{} and m64n{}k{}, operands in shared "
      "memory) for {:.1f} s: {:.1f} % of the peak at {:.0f} MHz, {}",
      c.tflops(), cases::short_name(c.dtype), c.keys, reduced, c.head_dim, reduced, c.seconds,
      c.peak_percent, 1e-6 * c.clock_hz,
      c.pj_per_flop() > 0 ? format("{:.0f} W{}, {:.3f} pJ/FLOP", c.reading.mean_watts(),
                                   c.reading.throttled ? "*" : "", c.pj_per_flop())
                          : "no reading of the power");
}

Json to_json(const BenchResult& r) {
  Json j;
  j["case"] = to_id(r.c);
  j["kernel"] = r.kernel;
  if (r.sustained) {
    const SustainedTiming& s = *r.sustained;
    j["sustained_ms"] = 1e3 * s.seconds_a_call;
    j["steady_seconds"] = s.steady_seconds;
    j["burst_ms"] = 1e3 * s.burst.median;
    j["burst_samples"] = s.burst.samples;
    j["calls_per_sample"] = s.burst.calls_per_sample;
    j["burst_tflops"] = seen_flops(r.c) / s.burst.median * 1e-12;
    if (r.burst_reading.samples > 0) j["burst_sm_clock_mhz"] = 1e-6 * r.burst_reading.clock_hz;
  } else {
    j["median_ms"] = 1e3 * r.timing.median;
    j["p10_ms"] = 1e3 * r.timing.p10;
    j["p90_ms"] = 1e3 * r.timing.p90;
    j["samples"] = r.timing.samples;
    j["calls_per_sample"] = r.timing.calls_per_sample;
  }
  j["workspace_bytes"] = r.workspace_bytes;
  j["score_matrix_bytes"] = score_matrix_bytes(r.c);
  j["tflops"] = r.tflops();
  j["gbps"] = r.gbps();
  if (r.buffers > 0) {
    j[r.sustained ? "sustained_us" : "median_us"] = 1e6 * r.seconds();
    j["buffers"] = r.buffers;
    j["kv_bytes"] = kv_bytes(r.c);
    j["share_of_copy"] = 0.01 * r.percent_of_copy();
  }
  j["keys_per_query"] = r.keys_per_query();
  if (const cases::MaskFacts* const facts = mask_facts(r.c)) {
    j["density"] = seen_share(r.c);
    j["full_blocks"] = facts->full;
    j["range_blocks"] = facts->ranges;
    j["bit_blocks"] = facts->bits;
  }
  if (r.keys_per_query() > 0) j["us_per_key"] = 1e6 * r.seconds() / r.keys_per_query();
  if (r.c.is_ragged()) {
    j["sequences"] = r.c.batch;
    j["tokens"] = queries(r.c);
    j["cost_per_token"] = cost_per_token(r.c);
  }
  if (r.beside) {
    j["beside"] = to_id(*r.beside);
    j["beside_ms"] = 1e3 * r.beside_timing.median;
    j["beside_tflops"] = r.beside_tflops();
    if (r.buffers > 0) {
      j["beside_us"] = 1e6 * r.beside_timing.median;
      j["beside_gbps"] = r.beside_gbps();
      if (r.copy_gbps > 0) j["beside_share_of_copy"] = r.beside_gbps() / r.copy_gbps;
    }
    j["ratio"] = r.ratio();
    if (r.quantize_seconds > 0) j["quantize_ms"] = 1e3 * r.quantize_seconds;
  }
  if (r.peak > 0) j["percent_of_peak"] = r.percent_of_peak();
  if (r.ceiling_tflops > 0) j["share_of_ceiling"] = 0.01 * r.percent_of_ceiling();
  if (r.beside_ceiling_tflops > 0)
    j["beside_share_of_ceiling"] = r.beside_tflops() / r.beside_ceiling_tflops;
  if (r.naive_seconds > 0) {
    j["naive_ms"] = 1e3 * r.naive_seconds;
    j["speedup_over_naive"] = r.naive_seconds / r.seconds();
  }
  add_reading(r.reading, &j);
  if (r.pj_per_flop() > 0) j["pj_per_flop"] = r.pj_per_flop();
  return j;
}

Json work_of(const cases::Case& c) {
  Json j;
  j["case"] = to_id(c);
  j["sequences"] = c.batch;
  j["tokens"] = queries(c);
  j["cost_per_token"] = cost_per_token(c);
  j["flops"] = seen_flops(c);
  j["bytes"] = tensor_bytes(c);
  return j;
}

Json to_json(const device::CeilingResult& c, const std::string& when) {
  Json j;
  j["when"] = when;
  j["dtype"] = cases::short_name(c.dtype);
  j["head_dim"] = c.head_dim;
  j["keys"] = c.keys;
  j["seconds"] = c.seconds;
  j["tflops"] = c.tflops();
  j["percent_of_peak"] = c.peak_percent;
  add_reading(c.reading, &j);
  j["sm_clock_mhz"] = 1e-6 * c.clock_hz;  // counted by the kernel: better than samples
  if (c.pj_per_flop() > 0) j["pj_per_flop"] = c.pj_per_flop();
  return j;
}

Json to_json(const CopyResult& c) {
  Json j;
  j["bytes"] = c.bytes;
  j["gbps"] = c.gbps;
  return j;
}

std::string to_csv(const Json& results) {
  // Columns in the order of the fullest row; a field that a row lacks stays empty.
  std::vector<std::string> columns;
  for (const Json& r : results)
    for (const auto& [name, value] : r.items())
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
  std::string text = format("{}\n", join(columns, ","));
  for (const Json& r : results) {
    for (size_t i = 0; i < columns.size(); ++i) {
      if (i > 0) text += ',';
      if (!r.contains(columns[i])) continue;
      const Json& value = r[columns[i]];
      text += value.is_string() ? quoted(value.get<std::string>()) : value.dump();
    }
    text += '\n';
  }
  return text;
}

namespace {

// Long enough for a step of a GPU's energy counter.
constexpr auto kLook = std::chrono::milliseconds(600);
constexpr char kPowercap[] = "/sys/class/powercap";

std::string compiler() {
#ifdef __clang__
  return format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return format("gcc {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

Json machine_of(const Json& metadata) {
  utsname system{};
  uname(&system);
  Json j;
  j["device"] = metadata.value("device", "");
  j["cpu"] = metadata.value("cpu", "");
  j["cores"] = available_cores();
  j["memory_gib"] = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGE_SIZE)) / (1 << 30);
  j["system"] = format("{} {} {}", system.sysname, system.release, system.machine);
  return j;
}

Json versions_of(const Json& metadata) {
  Json j;
  for (const char* name : {"flash3", "commit"}) j[name] = metadata.value(name, "");
  j["compiler"] = compiler();
  j["libc"] = format("glibc {}", gnu_get_libc_version());
  if (const std::string nvcc = kernel_compiler(); !nvcc.empty()) j["nvcc"] = nvcc;
  const auto cuda = device::cuda_versions();
  if (!cuda.runtime.empty()) j["cuda_runtime"] = cuda.runtime;
  if (!cuda.driver.empty()) j["cuda_driver"] = cuda.driver;
  if (metadata.contains("driver")) j["driver"] = metadata["driver"];
  return j;
}

// The mean of what /proc/cpuinfo has for each core; 0 where it has none.
double cpu_mhz() {
  std::ifstream file("/proc/cpuinfo");
  double sum = 0;
  int cores = 0;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("cpu MHz") && line.find(": ") != std::string::npos)
      sum += std::strtod(line.c_str() + line.find(": ") + 2, nullptr), ++cores;
  return cores > 0 ? sum / cores : 0;
}

Json cpu_state() {
  using Clock = std::chrono::steady_clock;
  const auto from = Clock::now();
  const std::optional<double> joules = package_joules(kPowercap);
  Json j;
  if (joules) {
    std::this_thread::sleep_for(kLook);
    const std::optional<double> later = package_joules(kPowercap);
    const double seconds = std::chrono::duration<double>(Clock::now() - from).count();
    // The counter starts again from 0 now and then.
    if (later && *later >= *joules) j["watts"] = (*later - *joules) / seconds;
  }
  if (const double mhz = cpu_mhz(); mhz > 0) j["cpu_mhz"] = mhz;
  return j;
}

}  // namespace

std::optional<double> package_joules(const std::filesystem::path& folder) {
  std::error_code error;
  std::optional<double> sum;
  for (const auto& zone : std::filesystem::directory_iterator(folder, error)) {
    std::string name;  // "package-0", also on AMD; its parts and what is not the CPU's have others
    std::ifstream(zone.path() / "name") >> name;
    if (!name.starts_with("package")) continue;
    double microjoules = 0;
    if (!(std::ifstream(zone.path() / "energy_uj") >> microjoules)) return std::nullopt;
    sum = sum.value_or(0) + 1e-6 * microjoules;
  }
  return sum;
}

Json machine_state(device::Monitor* monitor) {
  Json j = Json::object();
  if (monitor) {
    monitor->start();
    std::this_thread::sleep_for(kLook);
    add_reading(monitor->stop(), &j);
  } else {
    j.update(cpu_state());
  }
  double load = 0;
  if (getloadavg(&load, 1) == 1) j["load_average"] = load;
  return j;
}

Json shared_report(const Json& metadata, const Json& before, const Json& after) {
  Json all;
  all["format"] = kShareFormat;
  all["metadata"] = metadata;
  all["metadata"].erase("host");
  all["machine"] = machine_of(metadata);
  all["versions"] = versions_of(metadata);
  all["before"] = before;
  all["after"] = after;
  return all;
}

Json with_samples(Json j, const BenchResult& r) {
  const auto milliseconds = [](const Timing& timing) {
    Json list = Json::array();
    for (const double seconds : timing.all) list.push_back(1e3 * seconds);
    return list;
  };
  j["samples_ms"] = milliseconds(r.timing);
  if (r.beside) j["beside_samples_ms"] = milliseconds(r.beside_timing);
  return j;
}

}  // namespace flash3::cli
