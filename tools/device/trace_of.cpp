// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>

#include "device/trace.hpp"

namespace flash3::device {

Trace trace_of(const TraceBuffer& buffer, int block, int warpgroups) {
  const auto nanoseconds = buffer.nanoseconds[1] - buffer.nanoseconds[0];
  if (buffer.nanoseconds[0] == 0 || nanoseconds == 0)
    throw std::runtime_error("block " + std::to_string(block) +
                             " has noted no time: it has not run to its end");
  Trace trace;
  trace.block = block;
  trace.multiprocessor = int(buffer.multiprocessor);
  trace.first_clock = uint32_t(buffer.clocks[0]);
  trace.clock_hz = double(buffer.clocks[1] - buffer.clocks[0]) * 1e9 / double(nanoseconds);
  for (int list = 0; list < int(Role::kConsumer) + warpgroups; ++list) {
    if (buffer.counts[list] == 0) continue;
    const auto kept = std::min<uint32_t>(buffer.counts[list], kMostStamps);
    const Stamp* const first = buffer.stamps[list];
    trace.roles.push_back({Role(std::min(list, int(Role::kConsumer))),
                           std::max(0, list - int(Role::kConsumer)),
                           std::vector<Stamp>(first, first + kept), buffer.counts[list] - kept});
  }
  return trace;
}

}  // namespace flash3::device
