// SPDX-License-Identifier: Apache-2.0
// For each row i of a head, over the keys j that it sees:
//
//   p = softmax(scale · q·kⱼ)              dp_j = dout·vⱼ
//   ds_j = p_j · (dp_j − Σ p·dp + dlse)    the Jacobian of softmax and of log-sum-exp
//   dq = scale · Σ ds_j·kⱼ     dkⱼ += scale · ds_j·q     dvⱼ += p_j·dout
//
// A sink is one more score with a value of 0: its dp is 0, and its ds is summed up over the rows.
// A softcap's derivative multiplies ds; dropout multiplies dp, and p in dv, by 0 or by
// 1 / (1 − its p). Beside each product stands that of magnitudes, for the
// bounds (oracle/yardsticks/yardsticks.hpp).
//
// Rows go in groups that share the loads of K and V; one worker has all the query heads of a KV
// head, so that dK and dV are summed in one order whatever the number of threads.
#include <algorithm>
#include <cmath>

#include "oracle/attention_ref.hpp"
#include "oracle/bias_sums.hpp"
#include "oracle/one_sequence.hpp"
#include "oracle/reference_math.hpp"
#include "oracle/reference_rows.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3 {
namespace {

constexpr int kRows = kReferenceRows;

// A gradient and its bound, without the rounding of the result.
struct Sum {
  ReferenceTable<double> values;
  ReferenceTable<float> bounds;

  void resize(int64_t rows, int64_t columns) {
    values.resize(rows, columns);
    bounds.resize(rows, columns);
  }
  // terms: of the sum.
  void scale(int64_t row, int64_t columns, double terms, double factor) {
    const auto lost = static_cast<float>(terms * kFloat32Smallest);
    for (int64_t d = 0; d < columns; ++d) {
      values[row][d] *= factor;
      if (bounds[row][d] > 0) bounds[row][d] += lost;  // a sum of nothing is exactly 0
      bounds[row][d] *= static_cast<float>(factor);
    }
  }
};

// The query rows of a group.
struct QueryRows {
  ReferenceTable<double> rows;
  ReferenceTable<float> sizes;

  void resize(int64_t dim) {
    rows.resize(kRows, dim);
    sizes.resize(kRows, dim);
  }
  void load(const TensorView& t, flash3_dtype dtype, int64_t batch, int64_t row, int64_t head,
            int r) {
    load_row(t, dtype, batch, row, head, 1, rows[r]);
    magnitudes(rows[r], t.dim, sizes[r]);
  }
  void clear(int r) {
    std::fill_n(rows[r], rows.stride(), 0.0);
    std::fill_n(sizes[r], sizes.stride(), 0.f);
  }
};

// Computes heads of a problem whose sequences have one length, and hands the gradients to
// store.dq, dk and dv(batch, row, head, values, bounds) and store.dsink(batch, head, value, bound),
// and those of what is added to scores to store.biases.add().
template <class Store>
class Heads {
 public:
  Heads(const BackwardProblem& problem, const MaskPairs* pairs, const Store& store)
      : p_(problem),
        store_(store),
        pairs_(pairs),
        mask_(visible_keys(problem)),
        bound_(problem),
        terms_(static_cast<double>(
            std::max(problem.seq_k, problem.seq_q * problem.queries_per_kv_head()))) {
    q_.resize(p_.head_dim);
    dout_.resize(p_.head_dim_v);
    out_row_.resize(1, p_.head_dim_v);
    for (auto* table : {&probabilities_, &ds_}) table->resize(kRows, p_.seq_k);
    for (auto* table : {&p_errors_, &ds_errors_}) table->resize(kRows, p_.seq_k);
  }

  void compute(int64_t batch, int64_t kv_head) {
    k_.load(p_.k, p_.dtype, batch, kv_head);
    v_.load(p_.v, p_.dtype, batch, kv_head);
    dk_.resize(p_.seq_k, p_.head_dim);
    dv_.resize(p_.seq_k, p_.head_dim_v);
    const int64_t group = p_.queries_per_kv_head();
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      dsink_ = dsink_error_ = 0;
      mask_ = visible_keys(p_, pairs_, batch, head);
      for (int64_t begin = 0; begin < p_.seq_q; begin += kRows)
        compute_rows(batch, head, {begin, std::min<int64_t>(begin + kRows, p_.seq_q)});
      store_.dsink(batch, head, dsink_, dsink_error_);
    }
    for (int64_t j = 0; j < p_.seq_k; ++j) {
      dk_.scale(j, p_.head_dim, terms_, p_.softmax_scale);
      dv_.scale(j, p_.head_dim_v, terms_, 1);
      store_.dk(batch, j, kv_head, dk_.values[j], dk_.bounds[j]);
      store_.dv(batch, j, kv_head, dv_.values[j], dv_.bounds[j]);
    }
  }

 private:
  void compute_rows(int64_t batch, int64_t head, IndexRange rows) {
    bool finite = k_.finite;
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows.size()) {
        q_.clear(r), dout_.clear(r);
        continue;
      }
      q_.load(p_.q, p_.dtype, batch, rows.begin + r, head, r);
      dout_.load(p_.dout, p_.dtype, batch, rows.begin + r, head, r);
      finite =
          finite && all_finite(q_.rows[r], p_.head_dim) && all_finite(dout_.rows[r], p_.head_dim_v);
    }
    const IndexRange any = mask_.keys(rows.begin, rows.end);
    doubles_.dot_products(q_.rows, k_.panels, p_.head_dim, any, &probabilities_);
    doubles_.dot_products(dout_.rows, v_.panels, p_.head_dim_v, any, &ds_);
    IndexRange seen[kRows];
    for (int r = 0; r < kRows; ++r) {
      if (r < rows.size()) seen[r] = softmax_gradient(batch, head, rows.begin + r, r);
      seen[r].begin = std::clamp(seen[r].begin, any.begin, any.end);
      seen[r].end = std::clamp(seen[r].end, seen[r].begin, any.end);
      clear(r, {any.begin, seen[r].begin});
      clear(r, {seen[r].end, any.end});
    }

    dq_.resize(kRows, p_.head_dim);
    if (finite) {
      add_products(0, kRows, any);
    } else {  // zero times infinity is NaN
      for (int r = 0; r < rows.size(); ++r)
        mask_.for_each_range(rows.begin + r, [&](IndexRange keys) { add_products(r, 1, keys); });
    }
    for (int r = 0; r < rows.size(); ++r) {
      dq_.scale(r, p_.head_dim, terms_, p_.softmax_scale);
      store_.dq(batch, rows.begin + r, head, dq_.values[r], dq_.bounds[r]);
    }
  }

  static bool all_finite(const double* row, int64_t dim) {
    double sum = 0;  // zero times infinity is NaN
    for (int64_t d = 0; d < dim; ++d) sum += row[d] * 0;
    return sum == 0;
  }

  // Hidden pairs take part as zeros.
  void clear(int r, IndexRange keys) {
    for (double* row : {probabilities_[r], ds_[r]})
      std::fill(row + keys.begin, row + keys.end, 0.0);
    for (float* row : {p_errors_[r], ds_errors_[r]})
      std::fill(row + keys.begin, row + keys.end, 0.f);
  }

  void add_products(int first, int count, IndexRange keys) {
    doubles_.add_weighted(first, count, ds_, k_.rows, keys, &dq_.values);
    doubles_.add_transposed(first, count, ds_, q_.rows, keys, &dk_.values);
    doubles_.add_transposed(first, count, probabilities_, dout_.rows, keys, &dv_.values);
    floats_.add_weighted(first, count, ds_errors_, k_.sizes, keys, &dq_.bounds);
    floats_.add_transposed(first, count, ds_errors_, q_.sizes, keys, &dk_.bounds);
    floats_.add_transposed(first, count, p_errors_, dout_.sizes, keys, &dv_.bounds);
  }

  // Makes probabilities and ds, with their errors, from the scores and dp of row i. Returns the
  // keys that it sees.
  IndexRange softmax_gradient(int64_t batch, int64_t head, int64_t i, int r) {
    const IndexRange seen = mask_.keys(i);
    double *p = probabilities_[r], *ds = ds_[r];
    const RowScores scores(p_, mask_, batch, head, i);
    slopes_.resize(static_cast<size_t>(p_.seq_k));
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const auto [score, slope] = scores.of(p[j], j);
      p[j] = score, slopes_[static_cast<size_t>(j)] = slope;
    }
    mask_.for_each_hidden(i, [&](int64_t j) { p[j] = -std::numeric_limits<double>::infinity(); });
    const RowDropout dropout(p_, batch, head, i);
    for (int64_t j = seen.begin; dropout.given() && j < seen.end; ++j) ds[j] *= dropout.of(j);
    const double sink = sink_of(p_, head), lse = softmax(p, seen, sink);
    const double p_sink = sink_weight(sink, lse);
    double mean = 0;
    mask_.for_each_range(i, [&](IndexRange keys) {
      for (int64_t j = keys.begin; j < keys.end; ++j) mean += p[j] * ds[j];
    });
    double dlse = 0;
    if (p_.dlse.wanted)
      dlse = p_.dlse.data[batch * p_.dlse.stride_batch + head * p_.dlse.stride_head + i];

    const RowErrors error =
        errors_of(batch, head, i, r, scores.added(seen), dropout.scale(), sink, lse, dlse);
    if (store_.biases.wanted()) add_to_biases(batch, head, i, r, seen, mean - dlse, error);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const double slope = slopes_[static_cast<size_t>(j)];
      const double of_p = (ds[j] - mean + dlse) * slope;
      const double lost = underflow(p[j]);
      ds[j] = p[j] * of_p;
      const double kept = dropout.of(j);
      p_errors_[r][j] = static_cast<float>(kept * (error.weight * p[j] + error.smallest + lost));
      ds_errors_[r][j] = static_cast<float>(error.weight * std::abs(ds[j]) + error.smallest +
                                            lost * std::abs(of_p) + underflow(std::abs(ds[j])) +
                                            p[j] * (slope * error.of_dp + error.of_slope));
      p[j] *= kept;
    }
    mask_.for_each_hidden(i, [&](int64_t j) { clear(r, {j, j + 1}); });
    dsink_ += p_sink * (dlse - mean);
    dsink_error_ += p_sink * (error.sink_weight * std::abs(dlse - mean) + error.delta) +
                    underflow(p_sink) * std::abs(dlse - mean) +
                    underflow(p_sink * std::abs(dlse - mean));
    return seen;
  }

  struct RowErrors;
  // The gradient of what is added to the scores of a row: ds without the softcap's slope. Before
  // dp becomes ds.
  void add_to_biases(int64_t batch, int64_t head, int64_t i, int r, IndexRange seen, double delta,
                     const RowErrors& error) {
    const double *p = probabilities_[r], *dp = ds_[r];
    mask_.for_each_range(i, [&](IndexRange keys) {
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        if (p[j] == 0) continue;
        const double ds = p[j] * (dp[j] - delta), lost = underflow(p[j]) * std::abs(dp[j] - delta);
        gradients_[static_cast<size_t>(j)] = {ds, error.weight * std::abs(ds) + error.smallest +
                                                      lost + underflow(std::abs(ds)) +
                                                      p[j] * error.of_dp};
      }
    });
    store_.biases.add(batch, head, i, mask_.diagonal_of(i), seen, &gradients_);
  }

  // As oracle/yardsticks/yardsticks.hpp names them.
  struct RowErrors {
    double weight, smallest;  // u + Ep + 8ε + γ(n), and u·η
    double of_dp, of_slope;   // Δdp + Δδ; 2τ·(|dout|·max|v| + D)
    double delta;             // Δδ
    double sink_weight;       // Es + 8ε + γ(n)
  };
  // kept: what dropout multiplies dp by at most.
  RowErrors errors_of(int64_t batch, int64_t head, int64_t i, int r, double added, double kept,
                      double sink, double lse, double dlse) {
    const Precision dtype = bound_.of_dtype();
    load_row(p_.out, p_.dtype, batch, i, head, 1, out_row_[0]);
    double products = 0, smallest_products = 0;  // Σ|dout||out|, Σ|dout|·η
    for (int d = 0; d < p_.head_dim_v; ++d) {
      products += std::abs(dout_.rows[r][d] * out_row_[0][d]);
      smallest_products += std::abs(dout_.rows[r][d]) * dtype.smallest;
    }
    double keys = 0, largest_k = 0, largest_v = 0;
    mask_.for_each_range(i, [&](IndexRange range) {
      keys += static_cast<double>(range.size());
      largest_k = std::max(largest_k, k_.largest_norm(range));
      largest_v = std::max(largest_v, v_.largest_norm(range));
    });
    const double dp = kept * norm(dout_.rows[r], p_.head_dim_v) * largest_v;
    const double delta = products + std::abs(dlse), of_sum = bound_.sum(p_.head_dim_v);
    const double most = p_.softmax_scale * norm(q_.rows[r], p_.head_dim) * largest_k;
    const double score = bound_.score(most, added, keys, sink);
    const bool blind = lse == -std::numeric_limits<double>::infinity();

    RowErrors e{};
    e.weight = bound_.weight(blind ? 0 : bound_.probability(score, lse), terms_);
    e.smallest = dtype.roundoff * dtype.smallest;
    e.delta = (kSecondOrder * dtype.roundoff + of_sum) * (products + smallest_products) +
              4 * kFloat32Roundoff * delta;
    e.of_dp = (of_sum + 4 * kFloat32Roundoff) * dp + e.delta;
    e.of_slope = 2 * bound_.tanh() * (dp + delta);
    e.sink_weight = bound_.sum(terms_) + 8 * kFloat32Roundoff;
    if (std::isfinite(sink))
      e.sink_weight += bound_.probability(4 * kFloat32Roundoff * std::abs(sink), lse);
    return e;
  }

  const BackwardProblem& p_;
  const Store& store_;
  const MaskPairs* const pairs_;
  VisibleKeys mask_;
  const ErrorBound bound_;
  const double terms_;  // n
  const ReferenceLoops<double>& doubles_ = reference_loops<double>();
  const ReferenceLoops<float>& floats_ = reference_loops<float>();
  ReferenceKeys k_, v_;
  QueryRows q_, dout_;
  ReferenceTable<double> out_row_;
  ReferenceTable<double> probabilities_, ds_;  // first scores and dp
  ReferenceTable<float> p_errors_, ds_errors_;
  std::vector<double> slopes_;
  std::vector<GradientAndError> gradients_ = std::vector<GradientAndError>(size_t(p_.seq_k));
  Sum dq_, dk_, dv_;
  double dsink_ = 0, dsink_error_ = 0;
};

template <class Store>
void for_each_head_of_one_length(const BackwardProblem& p, const MaskPairs* mask, int num_threads,
                                 const Store& store) {
  for_each_kv_head(p, num_threads, [&] {
    return [heads = Heads<Store>(p, mask, store)](int64_t b, int64_t h) mutable {
      heads.compute(b, h);
    };
  });
}

// The gradients to where they belong in the whole batch; rows count from the first one of their
// sequence.
struct Store {
  const BackwardProblem& p;
  ReferenceBackward& to;
  std::vector<double>&sinks, &sink_errors;  // of each (batch, head): summed in one order
  struct OfSequence {
    BiasSums* sums;
    int64_t sequence = -1;
    bool wanted() const { return sums->wanted(); }
    void add(int64_t b, int64_t head, int64_t row, int64_t diagonal, IndexRange seen,
             std::vector<GradientAndError>* gradients) const {
      sums->add(sequence < 0 ? b : sequence, head, row, diagonal, seen, gradients);
    }
  } biases;
  int64_t sequence = -1;  // of a ragged batch

  struct Gradient {
    std::vector<double>& values;
    std::vector<float>& bounds;
  };
  void write(const Gradient& gradient, const Sequences& s, const TensorView& t, int64_t b,
             int64_t i, int64_t h, const double* values, const float* bounds) const {
    const int64_t row = row_in_batch(s, sequence < 0 ? b : sequence, i) * t.heads + h;
    std::copy_n(values, t.dim, &gradient.values[row * t.dim]);
    const Precision precision = precision_of(p.gradient_dtype);
    for (int64_t d = 0; d < t.dim; ++d)
      gradient.bounds[row * t.dim + d] = static_cast<float>(bounds[d] + precision.error(values[d]));
  }
  void dq(int64_t b, int64_t i, int64_t h, const double* x, const float* bounds) const {
    write({to.dq, to.dq_bound}, p.sequences_q, p.dq, b, i, h, x, bounds);
  }
  void dk(int64_t b, int64_t i, int64_t h, const double* x, const float* bounds) const {
    write({to.dk, to.dk_bound}, p.sequences_k, p.dk, b, i, h, x, bounds);
  }
  void dv(int64_t b, int64_t i, int64_t h, const double* x, const float* bounds) const {
    write({to.dv, to.dv_bound}, p.sequences_k, p.dv, b, i, h, x, bounds);
  }
  void dsink(int64_t b, int64_t h, double x, double error) const {
    const int64_t at = (sequence < 0 ? b : sequence) * p.heads_q + h;
    sinks[at] = x;
    sink_errors[at] = error;
  }
};

}  // namespace

ReferenceBackward attention_backward_ref(const BackwardProblem& p, int num_threads,
                                         const MaskPairs* mask) {
  check_pairs(p, mask);
  ReferenceBackward result;
  result.dq.resize(rows_in_batch(p.sequences_q, p.batch) * p.heads_q * p.head_dim);
  result.dk.resize(rows_in_batch(p.sequences_k, p.batch) * p.heads_k * p.head_dim);
  result.dv.resize(rows_in_batch(p.sequences_k, p.batch) * p.heads_k * p.head_dim_v);
  result.dq_bound.resize(result.dq.size());
  result.dk_bound.resize(result.dk.size());
  result.dv_bound.resize(result.dv.size());
  std::vector<double> sinks(p.batch * p.heads_q), sink_errors(p.batch * p.heads_q);
  BiasSums biases(p, &result);
  Store store{p, result, sinks, sink_errors, {&biases}};
  if (!p.is_ragged()) {
    for_each_head_of_one_length(p, mask, num_threads, store);
  } else {
    for (int64_t b = 0; b < p.batch; ++b) {
      store.sequence = store.biases.sequence = b;
      for_each_head_of_one_length(one_sequence(p, b), PairsOfSequence(mask, b).get(), num_threads,
                                  store);
    }
  }
  biases.finish(ErrorBound(p));
  if (!p.sink.given) return result;
  const Precision precision = precision_of(p.sink.dtype);
  for (int64_t h = 0; h < p.heads_q; ++h) {
    double sum = 0, error = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      sum += sinks[b * p.heads_q + h];
      error += sink_errors[b * p.heads_q + h];
    }
    result.dsink.push_back(sum);
    result.dsink_bound.push_back(static_cast<float>(error + precision.error(sum)));
  }
  return result;
}

}  // namespace flash3
