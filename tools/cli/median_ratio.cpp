// SPDX-License-Identifier: Apache-2.0
#include "cli/median_ratio.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

namespace flash3::cli {
namespace {

constexpr size_t kDraws = 2000;
constexpr double kOutside = 0.01;  // of the draws, half of them on each side

// The mean of the two in the middle of an even number.
double median(std::vector<double>* values) {
  const auto middle = values->begin() + std::ptrdiff_t(values->size() / 2);
  std::nth_element(values->begin(), middle, values->end());
  if (values->size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values->begin(), middle)) / 2;
}

// As many values as there are samples, by blocks that begin anywhere and go round the end.
void draw(const std::vector<double>& samples, std::mt19937_64& random, std::vector<double>* drawn) {
  const size_t count = samples.size();
  const size_t block = size_t(std::ceil(std::cbrt(double(count))));
  drawn->clear();
  while (drawn->size() < count) {
    const size_t start = size_t(random() % count);
    for (size_t i = 0; i < block && drawn->size() < count; ++i)
      drawn->push_back(samples[(start + i) % count]);
  }
}

}  // namespace

Interval median_ratio_interval(const std::vector<double>& a, const std::vector<double>& b) {
  if (std::min(a.size(), b.size()) < kLeastSamples)
    throw std::invalid_argument("a bootstrap of too few samples");
  std::mt19937_64 random(1);  // NOLINT(bugprone-random-generator-seed): the same draws each time
  std::vector<double> ratios, drawn_a, drawn_b;
  for (size_t i = 0; i < kDraws; ++i) {
    draw(a, random, &drawn_a);
    draw(b, random, &drawn_b);
    ratios.push_back(median(&drawn_a) / median(&drawn_b));
  }
  std::sort(ratios.begin(), ratios.end());
  const size_t cut = size_t(kOutside / 2 * kDraws);
  return {ratios[cut], ratios[kDraws - 1 - cut]};
}

}  // namespace flash3::cli
