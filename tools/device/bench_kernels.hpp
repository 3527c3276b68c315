// SPDX-License-Identifier: Apache-2.0
// The kernels that only measure: the ablation's, the ceiling's and the traced ones. They take as
// long to compile as a family of the library's own, so a build holds them only where
// FLASH3_BENCH_KERNELS is on: for make bench and for the tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cases/memory.hpp"
#include "device/device.hpp"
#include "device/monitor.hpp"
#include "device/trace/stamps.hpp"
#include "flash3/flash3.h"

namespace flash3::device {

// Throws std::runtime_error, with `what` and the way to such a build, if this program holds none.
void require_bench_kernels(const std::string& what);

// ---- the ablation ----
//
// The forward kernel with parts of its schedule switched off, to show what each part is worth: the
// ablation of the FlashAttention-3 paper (arXiv:2407.08608, section 4), on the paper's shape.

// The paper's shape, as a case; and as an FP8 one, which the paper has no figures of.
inline constexpr const char* kAblationCase = "fp16/b4/q8448/k8448/h16/d128/full";
inline constexpr const char* kFp8AblationCase =
    "e4m3/b4/q8448/k8448/h16/d128/full/blockscales/outfp16";

struct AblationVariant {
  std::string name, tile;      // "no GEMM-softmax overlap", "128x128"
  double paper_tflops;         // on the paper's H100; 0: the paper has no figure
  std::function<void()> call;  // enqueues one call; throws std::runtime_error if that fails
};

// The library's kernel first, then the others; each call writes params.out. params is a call on
// GPU memory in the head dim, dtypes and mask of one of these cases, contiguous; its contents are
// copied, what they point to is not. Throws std::runtime_error if a kernel cannot run it.
std::vector<AblationVariant> ablation_variants(const flash3_forward_params& params);

// ---- the ceiling ----
//
// What the tensor cores of a Hopper GPU sustain on attention's two products and nothing else: the
// figure that no attention kernel of that dtype passes on that GPU in that run, as power and not
// the clock limits it.

// Dense tensor-core throughput of a Hopper SM.
constexpr double flops_per_clock_per_sm(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT8_E4M3 ? 8192 : 4096;
}

struct CeilingResult {
  flash3_dtype dtype = FLASH3_BFLOAT16;
  int head_dim = 0;
  int keys = 0;         // of a tile: N of the instruction for S = Q·Kᵀ; head_dim is that of P·V
  double seconds = 0;   // measured, after the warm-up
  double flops = 0;     // in these seconds
  double clock_hz = 0;  // SM cycles that the kernel counted, over the seconds
  double peak_percent = 0;  // of the tensor cores' rate at that clock
  Reading reading;          // clock, watts and heat as NVML saw them meanwhile
  double tflops() const { return flops / seconds * 1e-12; }
  // Picojoules for each operation; 0 without a reading of the power.
  double pj_per_flop() const { return reading.mean_watts() * seconds / flops * 1e12; }
};

// Runs the products of attention for about `seconds`, after a warm-up of 0.4 s, on every SM of
// `gpu`: two warpgroups with 64 queries each, N(0, 1) operands that stay in shared memory, and P as
// a softmax of such scores leaves it. float16, bfloat16 or e4m3; head_dim 64, 128 or 256.
//
// Throws std::runtime_error if a launch fails, and if the figure cannot be one: above what the
// tensor cores can do in the cycles counted (then the compiler has dropped products), or with
// accumulators that are not finite (then the energy is not that of real data).
CeilingResult measure_ceiling(flash3_dtype dtype, int head_dim, double seconds, const Gpu& gpu,
                              Monitor& monitor, cases::Memory& memory);

// ---- the trace ----
//
// What the roles of one block of a forward kernel do, and when: by kernels that note the clock
// (trace/kernels.hpp).

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
