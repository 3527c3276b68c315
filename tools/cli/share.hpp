// SPDX-License-Identifier: Apache-2.0
// What flash3 bench --share writes beside the results: enough to compare them with a run elsewhere.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/bench_report.hpp"
#include "device/monitor.hpp"

namespace flash3::cli {

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
