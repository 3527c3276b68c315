// SPDX-License-Identifier: Apache-2.0
// What the tensor cores of a Hopper GPU sustain on attention's two products and nothing else: the
// figure that no attention kernel of that dtype passes on that GPU in that run, as power and not
// the clock limits it.
#pragma once

#include <string>

#include "cases/memory.hpp"
#include "device/device.hpp"
#include "device/monitor.hpp"
#include "flash3/flash3.h"

namespace flash3::device {

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

}  // namespace flash3::device
