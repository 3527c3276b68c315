// Timing as the results need it: samples of back-to-back calls, each long enough for the clock and
// for the chip's power control to settle into its real state.
#pragma once

#include <functional>

#include "cases/memory.hpp"

namespace flash3::cli {

struct Timing {
  double median = 0, p10 = 0, p90 = 0;  // seconds a call
  int samples = 0, calls_per_sample = 0;
};

// call() enqueues one call on memory's stream. Warms up, finds how many calls fill sample_seconds,
// then calls on_start() and takes the samples.
Timing measure(
    cases::Memory& memory, const std::function<void()>& call, int samples, double sample_seconds,
    const std::function<void()>& on_start = [] {});

}  // namespace flash3::cli
