// SPDX-License-Identifier: Apache-2.0
// How much faster one run is than another, and how sure that is.
#pragma once

#include <cstddef>
#include <vector>

namespace flash3::cli {

struct Interval {
  double low, high;
};

// Fewer samples say too little about what else they could have been.
inline constexpr size_t kLeastSamples = 10;

// Of median(a) / median(b), the 99 % interval of a bootstrap: 2000 times both are drawn again from
// their samples, in blocks of the cube root of their number, since neighbours resemble each other.
// The same samples have the same interval on every machine. Both need kLeastSamples.
Interval median_ratio_interval(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace flash3::cli
