// What the oracles of the forward and of the backward share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/band.hpp"
#include "core/convert.hpp"

namespace flash3 {

// Softmax of scores[keys] in place; returns the log-sum-exp. Where every weight is zero they stay
// zero, and the log-sum-exp is −∞; a score of NaN or +∞ makes the whole row NaN.
template <class Real>
Real softmax(Real* scores, Range keys) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  Real max = -kInfinity;
  for (Index j = keys.begin; j < keys.end; ++j) max = std::max(max, scores[j]);
  const Real origin = max == -kInfinity ? 0 : max;
  double sum = 0;
  for (Index j = keys.begin; j < keys.end; ++j) sum += scores[j] = std::exp(scores[j] - origin);
  if (sum == 0) return -kInfinity;
  for (Index j = keys.begin; j < keys.end; ++j) scores[j] = static_cast<Real>(scores[j] / sum);
  return static_cast<Real>(origin + std::log(sum));
}

// x as a tensor of this dtype would hold it.
inline float rounded(float x, flash3_dtype dtype) {
  uint32_t element = 0;
  store_float(&element, dtype, 0, x);
  return load_float(&element, dtype, 0);
}

}  // namespace flash3
