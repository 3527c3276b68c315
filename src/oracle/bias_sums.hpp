// SPDX-License-Identifier: Apache-2.0
// The gradients of what is added to scores, as the oracle of the backward sums them up.
#pragma once

#include <cmath>
#include <mutex>
#include <utility>
#include <vector>

#include "oracle/attention_ref.hpp"
#include "oracle/one_sequence.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3 {

struct GradientAndError {
  double gradient = 0, error = 0;
};

// The gradients of what is added to scores, of a whole call: each is a sum over many rows, of any
// worker.
class BiasSums {
 public:
  BiasSums(const BackwardProblem& p, ReferenceBackward* to) : p_(p) {
    const auto make = [&](const char* name, bool given, int64_t count) {
      if (!given) return static_cast<ReferenceValues*>(nullptr);
      ReferenceValues& made = to->added[name];
      made.values.resize(static_cast<size_t>(count)), made.bound.resize(static_cast<size_t>(count));
      return &made;
    };
    const BiasView& t = p.dbias;
    pairs_ = make("dbias", t.given, t.batch * t.heads * t.rows * t.keys);
    table_ =
        make("dbias_table", p.dbias_table.given, p.dbias_table.heads * p.dbias_table.entries());
    slopes_ = make("dalibi_slopes", p.dalibi_slopes.given,
                   p.heads_q * (p.dalibi_slopes.of_batch ? p.batch : 1));
    for (const ReferenceValues* sums : {pairs_, table_, slopes_})
      errors_.emplace_back(sums ? sums->values.size() : 0);
  }
  bool wanted() const { return pairs_ || table_ || slopes_; }

  // Those of a row, whose keys [seen) are set; they become 0 again. row: as p.dbias has it.
  void add(int64_t batch, int64_t head, int64_t row, int64_t diagonal, IndexRange seen,
           std::vector<GradientAndError>* gradients) {
    const std::scoped_lock lock(mutex_);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const GradientAndError x = std::exchange((*gradients)[static_cast<size_t>(j)], {});
      if (pairs_) add_to(pairs_, 0, place_of_pair(batch, head, row) + j, x, 1);
      if (table_)
        add_to(table_, 1,
               (p_.dbias_table.heads == 1 ? 0 : head) * p_.dbias_table.entries() +
                   p_.dbias_table.entry(j - diagonal),
               x, 1);
      if (slopes_)
        add_to(slopes_, 2, (p_.dalibi_slopes.of_batch ? batch * p_.heads_q : 0) + head, x,
               -static_cast<double>(std::abs(j - diagonal)));
    }
  }
  // Makes bounds of the errors of all terms: γ(n) and the result's own rounding join them.
  void finish(const ErrorBound& bound) {
    const double rows = static_cast<double>(rows_in_batch(p_.sequences_q, p_.batch)),
                 heads = static_cast<double>(p_.heads_q), keys = static_cast<double>(p_.seq_k);
    const BiasView& t = p_.dbias;
    const double of_pair = (t.sums_batch ? static_cast<double>(p_.batch) : 1) *
                           (t.sums_heads ? heads : 1) *
                           (t.sums_rows ? static_cast<double>(p_.sequences_q.rows) : 1);
    finish(pairs_, 0, bound.sum(of_pair), precision_of(t.dtype));
    finish(table_, 1, bound.sum(rows * heads * keys), precision_of(FLASH3_FLOAT32));
    finish(slopes_, 2, bound.sum(rows * keys), precision_of(FLASH3_FLOAT32));
  }

 private:
  struct Errors {
    double terms = 0, sizes = 0;  // Σ of the errors and of the magnitudes
  };
  int64_t place_of_pair(int64_t batch, int64_t head, int64_t row) const {
    const BiasView& t = p_.dbias;
    const int64_t b = t.batch == 1 ? 0 : batch, h = t.heads == 1 ? 0 : head;
    const int64_t first = p_.sequences_q.packed ? rows_of(p_.sequences_q, batch).first : 0;
    return ((b * t.heads + h) * t.rows + (t.rows == 1 ? 0 : first + row)) * t.keys;
  }
  void add_to(ReferenceValues* sums, size_t which, int64_t at, const GradientAndError& x,
              double factor) {
    sums->values[static_cast<size_t>(at)] += factor * x.gradient;
    Errors& errors = errors_[which][static_cast<size_t>(at)];
    errors.terms += std::abs(factor) * x.error;
    errors.sizes += std::abs(factor * x.gradient);
  }
  void finish(ReferenceValues* sums, size_t which, double of_sum, const Precision& precision) {
    if (!sums) return;
    for (size_t i = 0; i < sums->values.size(); ++i)
      sums->bound[i] =
          static_cast<float>(errors_[which][i].terms + of_sum * errors_[which][i].sizes +
                             precision.error(sums->values[i]));
  }

  const BackwardProblem& p_;
  ReferenceValues *pairs_, *table_, *slopes_;
  std::vector<std::vector<Errors>> errors_;
  std::mutex mutex_;
};

}  // namespace flash3
