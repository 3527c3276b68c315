// SPDX-License-Identifier: Apache-2.0
// A trace of a block's roles in seconds: as Chrome's trace format, and as a table.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "device/bench_kernels.hpp"

namespace flash3::cli {

using Json = nlohmann::ordered_json;

// What a role did from one stamp to the next, in microseconds since the trace's first clock.
struct TraceSpan {
  device::Phase phase;
  int number;  // the stamp's: of the key tile, or of the warpgroup
  double begin_us, end_us;
};

// A role's spans in order; a last phase of which no end was noted is left out.
std::vector<TraceSpan> spans_of(const device::RoleTrace& role, const device::Trace& trace);

std::string name_of(const device::RoleTrace& role);  // "K loader", "consumer 1"
std::string name_of(device::Phase phase);            // "wait for scores"

// about: what is noted beside the events. The earliest event is at 0.
std::string chrome_trace(const device::Trace& trace, const Json& about);

// For each role how often each phase came, how long it took, and its share of the role's time.
std::string trace_table(const device::Trace& trace);

}  // namespace flash3::cli
