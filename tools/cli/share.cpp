// SPDX-License-Identifier: Apache-2.0
#include "cli/share.hpp"

#include <gnu/libc-version.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>

#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/machine_code.hpp"
#include "device/device.hpp"

namespace flash3::cli {
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
