// SPDX-License-Identifier: Apache-2.0
// Timing as the results need it: samples of back-to-back calls, each long enough for the clock and
// for the chip's power control to settle into its real state.
#pragma once

#include <functional>
#include <vector>

#include "cases/memory.hpp"

namespace flash3::cli {

struct Timing {
  double median = 0, p10 = 0, p90 = 0;  // seconds a call
  int samples = 0, calls_per_sample = 0;
  std::vector<double> all{};  // seconds a call of each sample, as they were taken
};

// The timing of one call, where what was timed is so many.
Timing per_call(Timing timing, int calls);

// call() enqueues one call on memory's stream. Warms up, finds how many calls fill sample_seconds,
// then calls on_start() and takes the samples.
Timing measure(
    cases::Memory& memory, const std::function<void()>& call, int samples, double sample_seconds,
    const std::function<void()>& on_start = [] {});

// The same for several calls whose samples are interleaved, each round from another one on, so
// that clock and heat favour none of them.
std::vector<Timing> measure_interleaved(cases::Memory& memory,
                                        const std::vector<std::function<void()>>& calls,
                                        int samples, double sample_seconds,
                                        const std::function<void()>& on_start);

// A burst is what a chip does before power and heat hold it back, the sustained rate what is left
// when they have.
struct SustainedTiming {
  Timing burst;               // the first kBurstSamples after kPause
  double seconds_a_call = 0;  // the mean over the second half of the run
  double steady_seconds = 0;  // that half
  static constexpr int kBurstSamples = 5;
  static constexpr double kPause = 2;  // seconds
};

// The parts of a sustained run: its first samples, then until its first half is over, then the
// rest.
enum class Phase { kBurst, kSettling, kSteady };

// Warms up, pauses, then runs calls without a break for `seconds`. on_phase is called where a phase
// begins; kSettling is left out of a run so short that the burst fills its first half.
SustainedTiming measure_sustained(cases::Memory& memory, const std::function<void()>& call,
                                  double seconds, double sample_seconds,
                                  const std::function<void(Phase)>& on_phase);

}  // namespace flash3::cli
