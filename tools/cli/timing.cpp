#include "cli/timing.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace flash3::cli {

Timing measure(cases::Memory& memory, const std::function<void()>& call, int samples,
               double sample_seconds, const std::function<void()>& on_start) {
  int calls = 1;
  const auto sample = [&] {
    return memory.time([&] {
      for (int i = 0; i < calls; ++i) call();
    }) / calls;
  };

  // Doubles the calls until they fill a sample, then goes on for ten samples, within a second: long
  // enough for caches to be warm and for a GPU's clock to come up and settle.
  double seconds = sample();
  while (seconds * calls < sample_seconds && calls < 1'000'000) {
    calls *= 2;
    seconds = sample();
  }
  const auto fit = [&] {
    calls = std::max(1, static_cast<int>(std::ceil(sample_seconds / std::max(seconds, 1e-9))));
  };
  fit();
  const double warm = std::min(10 * sample_seconds, 1.0);
  for (double spent = 0; spent < warm; spent += seconds * calls) seconds = sample();
  fit();

  on_start();
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) times.push_back(sample());
  std::sort(times.begin(), times.end());
  const auto quantile = [&](double q) {
    return times[static_cast<size_t>(std::lround(q * static_cast<double>(times.size() - 1)))];
  };
  return {quantile(0.5), quantile(0.1), quantile(0.9), samples, calls};
}

}  // namespace flash3::cli
