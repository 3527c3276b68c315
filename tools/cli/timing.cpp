// SPDX-License-Identifier: Apache-2.0
#include "cli/timing.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "cli/progress.hpp"

namespace flash3::cli {
namespace {

// Takes samples of one call, and knows how many calls fill one.
class Sampler {
 public:
  // Doubles the calls until they fill a sample, then goes on for ten samples, within a second: long
  // enough for caches to be warm and for a GPU's clock to come up and settle.
  Sampler(cases::Memory& memory, const std::function<void()>& call, double sample_seconds)
      : memory_(memory), call_(call) {
    double seconds = sample();
    while (seconds * calls_ < sample_seconds && calls_ < 1'000'000) {
      calls_ *= 2;
      seconds = sample();
    }
    fit(seconds, sample_seconds);
    const double warm = std::min(10 * sample_seconds, 1.0);
    for (double spent = 0; spent < warm; spent += seconds * calls_) seconds = sample();
    fit(seconds, sample_seconds);
  }

  // Seconds a call.
  double sample() {
    throw_if_stopped();
    return memory_.time([&] {
      for (int i = 0; i < calls_; ++i) call_();
    }) / calls_;
  }
  int calls() const { return calls_; }

 private:
  void fit(double seconds, double sample_seconds) {
    calls_ = std::max(1, static_cast<int>(std::ceil(sample_seconds / std::max(seconds, 1e-9))));
  }

  cases::Memory& memory_;
  const std::function<void()>& call_;
  int calls_ = 1;
};

Timing summary(std::vector<double> times, int calls) {
  std::vector<double> taken = times;
  std::sort(times.begin(), times.end());
  const auto quantile = [&](double q) {
    return times[static_cast<size_t>(std::lround(q * static_cast<double>(times.size() - 1)))];
  };
  return {quantile(0.5), quantile(0.1),   quantile(0.9), static_cast<int>(times.size()),
          calls,         std::move(taken)};
}

}  // namespace

Timing per_call(Timing timing, int calls) {
  for (double* seconds : {&timing.median, &timing.p10, &timing.p90}) *seconds /= calls;
  for (double& seconds : timing.all) seconds /= calls;
  timing.calls_per_sample *= calls;
  return timing;
}

Timing measure(cases::Memory& memory, const std::function<void()>& call, int samples,
               double sample_seconds, const std::function<void()>& on_start) {
  Sampler sampler(memory, call, sample_seconds);
  on_start();
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) times.push_back(sampler.sample());
  return summary(std::move(times), sampler.calls());
}

std::vector<Timing> measure_interleaved(cases::Memory& memory,
                                        const std::vector<std::function<void()>>& calls,
                                        int samples, double sample_seconds,
                                        const std::function<void()>& on_start) {
  std::vector<Sampler> samplers;
  for (const auto& call : calls) samplers.emplace_back(memory, call, sample_seconds);
  on_start();
  std::vector<std::vector<double>> times(calls.size());
  for (size_t round = 0; round < static_cast<size_t>(samples); ++round)
    for (size_t step = 0; step < calls.size(); ++step) {
      const size_t i = (round + step) % calls.size();
      times[i].push_back(samplers[i].sample());
    }
  std::vector<Timing> timings;
  for (size_t i = 0; i < calls.size(); ++i)
    timings.push_back(summary(std::move(times[i]), samplers[i].calls()));
  return timings;
}

SustainedTiming measure_sustained(cases::Memory& memory, const std::function<void()>& call,
                                  double seconds, double sample_seconds,
                                  const std::function<void(Phase)>& on_phase) {
  using Clock = std::chrono::steady_clock;
  Sampler sampler(memory, call, sample_seconds);
  std::this_thread::sleep_for(std::chrono::duration<double>(SustainedTiming::kPause));

  std::vector<double> burst;
  double steady_seconds = 0;
  int64_t steady_calls = 0;
  Phase phase = Phase::kBurst;
  const auto enter = [&](Phase next) {
    phase = next;
    on_phase(next);
  };
  enter(Phase::kBurst);
  const auto start = Clock::now();
  for (double elapsed = 0; elapsed < seconds || steady_calls == 0;
       elapsed = std::chrono::duration<double>(Clock::now() - start).count()) {
    if (phase != Phase::kSteady && elapsed >= seconds / 2 && !burst.empty()) {
      enter(Phase::kSteady);
    } else if (phase == Phase::kBurst && burst.size() == SustainedTiming::kBurstSamples) {
      enter(Phase::kSettling);
    }
    const double one = sampler.sample();
    if (phase == Phase::kBurst) burst.push_back(one);
    if (phase == Phase::kSteady) {
      steady_calls += sampler.calls();
      steady_seconds += one * sampler.calls();
    }
  }
  SustainedTiming t;
  t.burst = summary(std::move(burst), sampler.calls());
  t.steady_seconds = steady_seconds;
  t.seconds_a_call = steady_seconds / static_cast<double>(steady_calls);
  return t;
}

}  // namespace flash3::cli
