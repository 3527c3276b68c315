// SPDX-License-Identifier: Apache-2.0
// What the oracles of the forward and of the backward share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "core/convert.hpp"
#include "core/problem.hpp"
#include "oracle/mask_pairs.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3 {

// Throws std::invalid_argument where the call has a mask whose pairs are not given.
inline void check_pairs(const Problem& p, const MaskPairs* mask) {
  if (p.mask_lists.given && !mask)
    throw std::invalid_argument("the call has a mask but the pairs that it shows are not given");
}

// The mask of a call whose sequences have one length; with a tree of its first sequence.
inline VisibleKeys visible_keys(const Problem& p) {
  VisibleKeys mask = VisibleKeys::of_rule(p.mask_rule, p.seq_q, p.seq_k);
  mask.tree = p.tree.words;
  return mask;
}

// The same of one sequence and head, where the call has a mask; null: it has none.
inline VisibleKeys visible_keys(const Problem& p, const MaskPairs* mask, int64_t b, int64_t h) {
  VisibleKeys keys = visible_keys(p);
  if (mask) keys = mask->of(keys, b, h);
  return keys;
}

// A query head's sink; −∞ if there is none, which is as a sink of that value.
inline float sink_of(const Problem& p, int64_t head) {
  return p.sink.data ? load_float(p.sink.data, p.sink.dtype, head)
                     : -std::numeric_limits<float>::infinity();
}

// The largest of scores[keys], −∞ of none; NaN if one of them is.
template <class Real>
Real largest_of(const Real* scores, IndexRange keys) {
  Real largest = -std::numeric_limits<Real>::infinity();
  for (int64_t j = keys.begin; j < keys.end; ++j)
    if (std::isnan(scores[j]) || scores[j] > largest) largest = scores[j];
  return largest;
}

// Softmax of scores[keys] in place, with one more logit that has no place there; returns the
// log-sum-exp. Where every weight is zero they stay zero, and the log-sum-exp is −∞; a score of NaN
// or +∞ makes the whole row NaN.
template <class Real>
Real softmax(Real* scores, IndexRange keys, Real sink) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  Real max = sink;
  for (int64_t j = keys.begin; j < keys.end; ++j) max = std::max(max, scores[j]);
  const Real origin = max == -kInfinity ? 0 : max;
  double sum = std::exp(sink - origin);
  for (int64_t j = keys.begin; j < keys.end; ++j) sum += scores[j] = std::exp(scores[j] - origin);
  if (sum == 0) return -kInfinity;
  for (int64_t j = keys.begin; j < keys.end; ++j) scores[j] = static_cast<Real>(scores[j] / sum);
  return static_cast<Real>(origin + std::log(sum));
}

// The same with weights as an FP8 product takes them: exp(score − max) is rounded to e4m3 times
// kE4m3WeightScale before it is divided by the sum of those not rounded.
template <class Real>
Real fp8_softmax(Real* scores, IndexRange keys, Real sink) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  Real max = -kInfinity;
  for (int64_t j = keys.begin; j < keys.end; ++j) max = std::max(max, scores[j]);
  if (max == -kInfinity) max = sink;
  const Real origin = max == -kInfinity ? 0 : max;
  double sum = std::exp(static_cast<double>(sink) - origin);
  for (int64_t j = keys.begin; j < keys.end; ++j) sum += scores[j] = std::exp(scores[j] - origin);
  if (sum == 0) return -kInfinity;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const float weight = static_cast<float>(scores[j]) * kE4m3WeightScale;
    scores[j] = static_cast<Real>(e4m3_to_float(float_to_e4m3(weight)) / kE4m3WeightScale / sum);
  }
  return static_cast<Real>(origin + std::log(sum));
}

// The weight that a sink has in a row with this log-sum-exp.
template <class Real>
Real sink_weight(Real sink, Real lse) {
  return sink == -std::numeric_limits<Real>::infinity() ? 0 : std::exp(sink - lse);
}

// What becomes of the dot products of one row: scores, and the derivative of each by the scaled
// product.
class RowScores {
 public:
  RowScores(const Problem& p, const VisibleKeys& mask, int64_t batch, int64_t head, int64_t row)
      : p_(p),
        slope_(p.alibi_slopes.at(batch, head)),
        diagonal_(mask.diagonal_of(row)),
        table_(p.bias_table.data ? p.bias_table.data + head * p.bias_table.stride_head : nullptr),
        of_row_(p.bias.offset(batch, head, row)) {}

  template <class Real>
  struct Score {
    Real value, slope;  // 1 − tanh² of the softcap
  };

  // Step by step, as a plain implementation computes it; round() is what its tensors do to each
  // step.
  template <class Real, class Round>
  Score<Real> of(Real dot, int64_t key, const Round& round) const {
    Score<Real> score{round(dot * Real(p_.softmax_scale)), 1};
    if (p_.softcap != 0.f) {
      const Real tanh = round(std::tanh(round(score.value / Real(p_.softcap))));
      score.value = round(Real(p_.softcap) * tanh);
      const Real kept = score.value / Real(p_.softcap);
      score.slope = 1 - kept * kept;
    }
    if (p_.alibi_slopes.data)
      score.value = round(score.value - Real(slope_) * Real(std::abs(diagonal_ - key)));
    for (const float added : {of_table(key), of_pair(key)}) {
      if (added != 0) score.value = round(score.value + Real(added));
      // It hides the pair, whatever its score is.
      if (added == -std::numeric_limits<float>::infinity()) score = {Real(added), 0};
    }
    return score;
  }
  template <class Real>
  Score<Real> of(Real dot, int64_t key) const {
    return of(dot, key, [](Real x) { return x; });
  }
  // The largest magnitude that is added to the score of one of these keys; what hides a pair is
  // none.
  double added(IndexRange keys) const {
    if (!p_.alibi_slopes.data && !table_ && !p_.bias.data) return 0;
    double largest = 0;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const double sum = std::abs(slope_ * static_cast<double>(diagonal_ - j)) +
                         std::abs(of_table(j)) + std::abs(of_pair(j));
      if (std::isfinite(sum)) largest = std::max(largest, sum);
    }
    return largest;
  }

 private:
  float of_table(int64_t key) const {
    return table_ ? table_[p_.bias_table.entry(key - diagonal_)] : 0.f;
  }
  float of_pair(int64_t key) const {
    const BiasView& t = p_.bias;
    return t.data ? load_float(t.data, t.dtype, of_row_ + key * t.stride_key) : 0.f;
  }

  const Problem& p_;
  const float slope_;       // of ALiBi
  const int64_t diagonal_;  // i'
  const float* table_;      // of the head; null: none
  const int64_t of_row_;    // into the bias
};

// What dropout makes of the weights of one row: 0, or more of those that are kept.
class RowDropout {
 public:
  RowDropout(const Problem& p, int64_t batch, int64_t head, int64_t row)
      : threshold_(p.dropout.threshold),
        key_(p.dropout.given() ? p.dropout_key() : PhiloxKey{}),
        head_(p.dropout_head(batch, head)),
        row_(static_cast<int>(row)) {}

  bool given() const { return threshold_ > 0; }
  // What kept weights are multiplied by.
  double scale() const { return 65536. / (65536 - threshold_); }
  double of(int64_t key) const {
    if (!given()) return 1;
    return dropout_keeps(key_, threshold_, head_, row_, static_cast<int>(key)) ? scale() : 0;
  }

 private:
  const unsigned threshold_;
  const PhiloxKey key_;
  const unsigned head_;
  const int row_;
};

// x as a tensor of this dtype would hold it.
inline float rounded(float x, flash3_dtype dtype) {
  uint32_t element = 0;
  store_float(&element, dtype, 0, x);
  return load_float(&element, dtype, 0);
}

}  // namespace flash3
