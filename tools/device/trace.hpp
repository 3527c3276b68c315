// SPDX-License-Identifier: Apache-2.0
// What the roles of one block of a forward kernel do, and when: by kernels that note the clock
// (trace/kernels.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cases/memory.hpp"
#include "device/trace/stamps.hpp"
#include "flash3/flash3.h"

namespace flash3::device {

struct RoleTrace {
  Role role;
  int warpgroup;  // of a consumer
  std::vector<Stamp> stamps;
  uint32_t left_out;  // stamps for which there was no room
};

struct Trace {
  std::vector<RoleTrace> roles;  // those that the block has
  int block = 0, multiprocessor = 0;
  uint32_t first_clock = 0;  // when the first consumer began
  double clock_hz = 0;
};

// One call, by a kernel of the library and by the same one with stamps. Both write params.out.
struct TracedCall {
  std::string kernel;   // that is traced
  std::string planned;  // that the library takes for the call
  int blocks = 0;
  std::function<void()> library, traced;  // enqueue a call of `kernel`; throw if that fails
  std::function<Trace()> read;            // what the last traced call has noted; waits for it
};

// params: a call on GPU memory. Throws std::runtime_error if no traced kernel runs it, or if it has
// no such block.
TracedCall traced_call(const flash3_forward_params& params, int block, cases::Memory& memory);

// From what the block has written. warpgroups: of consumers. Throws std::runtime_error if the block
// has not run.
inline Trace trace_of(const TraceBuffer& buffer, int block, int warpgroups) {
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
