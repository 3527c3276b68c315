#include "cli/timing.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
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

  // Doubles the calls until they fill a sample, then three samples more: at least a warm cache, on
  // a GPU also a clock that has come up.
  double seconds = sample();
  while (seconds * calls < sample_seconds && calls < 1'000'000) {
    calls *= 2;
    seconds = sample();
  }
  calls = std::max(1, static_cast<int>(std::ceil(sample_seconds / std::max(seconds, 1e-9))));
  for (int i = 0; i < 3 && seconds * calls < 1; ++i) seconds = sample();
  calls = std::max(1, static_cast<int>(std::ceil(sample_seconds / std::max(seconds, 1e-9))));

  on_start();
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) times.push_back(sample());
  std::sort(times.begin(), times.end());
  const auto quantile = [&](double q) {
    return times[static_cast<size_t>(std::lround(q * static_cast<double>(times.size() - 1)))];
  };
  return {quantile(0.5), quantile(0.1), quantile(0.9), samples, calls};
}

void forward_or_throw(const flash3_forward_params& params) {
  if (flash3_forward(&params) != FLASH3_OK) throw std::runtime_error(flash3_last_error());
}

}  // namespace flash3::cli
