// SPDX-License-Identifier: Apache-2.0
// RowGroup in groups, three steps: scores of the keys that they see, softmax of each, weighted sum
// of V; beside it that of |V|, for the bounds. K and V of a head are converted once.
#include "oracle/attention_ref.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "oracle/one_sequence.hpp"
#include "oracle/reference_math.hpp"
#include "oracle/reference_rows.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3 {
namespace {

constexpr int kRows = kReferenceRows;

struct RowResult {
  const double* out;
  const float* out_bound;
  double lse, lse_bound;
  double largest, largest_bound;  // of the scores
  double lost;                    // of out, where all weights are small
};

// Called with batch, row, head and what the row has.
using Store = std::function<void(int64_t, int64_t, int64_t, const RowResult&)>;

// Computes rows and hands each to store.
class RowGroup {
 public:
  RowGroup(const ForwardProblem& problem, const MaskPairs* pairs, const Store& store)
      : p_(problem),
        store_(store),
        pairs_(pairs),
        mask_(visible_keys(problem)),
        bound_(problem, problem.quantizes || problem.dtype == FLASH3_FLOAT8_E4M3),
        of_out_(precision_of(problem.out_dtype)) {
    q_.resize(kRows, p_.score_dim());
    scores_.resize(kRows, p_.seq_k);
    sizes_.resize(kRows, p_.seq_k);
  }

  // rows: at most kRows of them.
  void compute(int64_t batch, int64_t head, IndexRange rows) {
    load_head(batch, head / p_.queries_per_kv_head());
    mask_ = visible_keys(p_, pairs_, batch, head);
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      double* const q = q_[i - rows.begin];
      load_row(p_.q, p_.dtype, batch, i, head, p_.q_scale.at(batch, head, i / kScaleBlock), q);
      if (p_.has_qv()) load_row(p_.qv, p_.dtype, batch, i, head, 1, q + p_.head_dim);
    }
    const IndexRange any = mask_.keys(rows.begin, rows.end);
    doubles_.dot_products(q_, k_.panels, p_.score_dim(), any, &scores_);

    RowResult results[kRows];
    IndexRange seen[kRows];
    float of_size[kRows];
    for (int r = 0; r < kRows; ++r) {
      if (r < rows.size()) {
        seen[r] = mask_.keys(rows.begin + r);
        of_size[r] = softmax_of(batch, head, rows.begin + r, r, &results[r]);
      }
      // Pairs that are hidden take part as zeros.
      seen[r].begin = std::clamp(seen[r].begin, any.begin, any.end);
      seen[r].end = std::clamp(seen[r].end, seen[r].begin, any.end);
      for (const IndexRange hidden :
           {IndexRange{any.begin, seen[r].begin}, IndexRange{seen[r].end, any.end}}) {
        std::fill(scores_[r] + hidden.begin, scores_[r] + hidden.end, 0.0);
        std::fill(sizes_[r] + hidden.begin, sizes_[r] + hidden.end, 0.f);
      }
    }

    out_.resize(kRows, p_.head_dim_v);
    out_bound_.resize(kRows, p_.head_dim_v);
    const auto sum_up = [&](int first, int count, IndexRange keys) {
      doubles_.add_weighted(first, count, scores_, v_.rows, keys, &out_);
      floats_.add_weighted(first, count, sizes_, v_.sizes, keys, &out_bound_);
    };
    if (v_.finite) {
      sum_up(0, rows.size() == 1 ? 1 : kRows, any);
    } else {  // zero times infinity is NaN
      for (int r = 0; r < rows.size(); ++r)
        mask_.for_each_range(rows.begin + r, [&](IndexRange keys) { sum_up(r, 1, keys); });
    }
    for (int r = 0; r < rows.size(); ++r) {
      for (int d = 0; d < p_.head_dim_v; ++d) {
        float& bound = out_bound_[r][d];
        const double own = out_[r][d];
        const float sum = bound_.fp8() ? static_cast<float>(std::sqrt(bound + own * own)) : bound;
        bound = static_cast<float>(of_size[r] * sum + of_out_.error(own) +
                                   underflow(std::abs(own)) + results[r].lost);
      }
      results[r].out = out_[r], results[r].out_bound = out_bound_[r];
      store_(batch, rows.begin + r, head, results[r]);
    }
  }

 private:
  void load_head(int64_t batch, int64_t head) {
    if (batch == batch_ && head == head_) return;
    batch_ = batch, head_ = head;
    k_.load(p_.k, p_.kv_dtype, batch, head, &p_.k_scale, p_.has_qv() ? &p_.v : nullptr);
    v_.load(p_.v, p_.kv_dtype, batch, head, &p_.v_scale);
    if (!bound_.fp8()) return;
    for (int64_t j = 0; j < p_.seq_k; ++j)
      for (int d = 0; d < p_.head_dim_v; ++d) v_.sizes[j][d] *= v_.sizes[j][d];
  }

  // Dot products become probabilities, and sizes_ what rounds of them; squares in FP8. Returns what
  // their sum is multiplied with for the bound of out.
  float softmax_of(int64_t batch, int64_t head, int64_t row, int r, RowResult* result) {
    const IndexRange seen = mask_.keys(row);
    const RowScores scores(p_, mask_, batch, head, row);
    double* p = scores_[r];
    for (int64_t j = seen.begin; j < seen.end; ++j) p[j] = scores.of(p[j], j).value;
    mask_.for_each_hidden(row, [&](int64_t j) { p[j] = -std::numeric_limits<double>::infinity(); });
    const double sink = sink_of(p_, head);
    result->largest = largest_of(p, seen);
    result->lse = softmax(p, seen, sink);

    double keys = 0, largest_norm = 0;
    mask_.for_each_range(row, [&](IndexRange range) {
      keys += static_cast<double>(range.size());
      largest_norm = std::max<double>(largest_norm, k_.largest_norm(range));
    });
    const double most = p_.softmax_scale * norm(q_[r], p_.score_dim()) * largest_norm;
    const double added = scores.added(seen), error = bound_.score(most, added, keys, sink);
    result->largest_bound = bound_.score(most, added, 0, 0);
    result->lse_bound = bound_.lse(error, result->lse, keys);
    double largest = 0;
    for (int64_t j = seen.begin; j < seen.end; ++j) largest = std::max(largest, p[j]);
    const double smallest = bound_.of_dtype().smallest * largest;
    const RowDropout dropout(p_, batch, head, row);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const double kept = dropout.of(j), size = kept * (p[j] + smallest);
      p[j] *= kept;
      sizes_[r][j] = static_cast<float>(bound_.fp8() ? size * size : size);
    }
    mask_.for_each_hidden(row, [&](int64_t j) { sizes_[r][j] = 0; });
    // With dropout all that is left of a row may be small too.
    const double lost = dropout.given() ? kFloat32Smallest : underflow(largest);
    result->lost =
        lost > 0 ? dropout.scale() * keys * lost * v_.largest_norm(seen) : 0;  // v may be infinite
    return static_cast<float>(bound_.out(error, keys));
  }

  const ForwardProblem& p_;
  const Store& store_;
  const MaskPairs* const pairs_;
  VisibleKeys mask_;
  const ErrorBound bound_;
  const Precision of_out_;
  const ReferenceLoops<double>& doubles_ = reference_loops<double>();
  const ReferenceLoops<float>& floats_ = reference_loops<float>();
  ReferenceKeys k_, v_;
  int64_t batch_ = -1, head_ = -1;
  ReferenceTable<double> q_, scores_, out_;
  ReferenceTable<float> sizes_, out_bound_;
};

void for_each_row_of_one_length(const ForwardProblem& p, const MaskPairs* mask, int num_threads,
                                const Store& store) {
  for_each_row_group<kRows>(p, num_threads, [&] { return RowGroup(p, mask, store); });
}

// Every row of every sequence. row counts from the first one of its sequence.
void for_each_row(const ForwardProblem& p, const MaskPairs* mask, int num_threads,
                  const Store& store) {
  if (!p.is_ragged() && !p.tree.given)
    return for_each_row_of_one_length(p, mask, num_threads, store);
  for (int64_t b = 0; b < p.batch; ++b)
    for_each_row_of_one_length(
        one_sequence(p, b), PairsOfSequence(mask, b).get(), num_threads,
        [&](int64_t, int64_t row, int64_t head, const RowResult& x) { store(b, row, head, x); });
}

// Rows are those of `lse_rows` of each head. The largest of them errs by no more than lies between
// it and the largest that one of them may become.
ReferenceValues largest_of_heads(const ReferenceValues& rows, int64_t heads, int64_t lse_rows) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  std::vector<double> largest(static_cast<size_t>(heads), kNothing), upper = largest;
  for (size_t i = 0; i < rows.values.size(); ++i) {
    const auto head = i / static_cast<size_t>(lse_rows) % largest.size();
    if (std::isnan(rows.values[i]) || rows.values[i] > largest[head])
      largest[head] = rows.values[i];
    upper[head] = std::max(upper[head], rows.values[i] + rows.bound[i]);
  }
  ReferenceValues made{std::move(largest), {}};
  for (size_t head = 0; head < upper.size(); ++head)
    made.bound.push_back(
        std::isfinite(made.values[head]) ? static_cast<float>(upper[head] - made.values[head]) : 0);
  return made;
}

}  // namespace

ReferenceForward attention_ref(const ForwardProblem& p, int num_threads, const MaskPairs* mask) {
  check_pairs(p, mask);
  if (p.has_cache() || p.rotates)
    return attention_ref(GatheredCache(p).problem(), num_threads, mask);
  const int64_t rows = rows_in_batch(p.sequences_q, p.batch);
  ReferenceForward result;
  result.out.resize(rows * p.heads_q * p.head_dim_v);
  result.out_bound.resize(result.out.size());
  result.lse.resize(rows * p.heads_q);
  result.lse_bound.resize(result.lse.size());
  ReferenceValues logits;
  if (p.max_logits.wanted) {
    logits.values.assign(result.lse.size(), -std::numeric_limits<double>::infinity());
    logits.bound.resize(result.lse.size());
  }
  // lse is [batch, heads, rows of one], or packed [heads, rows].
  const int64_t lse_rows = p.sequences_q.rows, lse_batches = p.sequences_q.packed ? 0 : 1;
  for_each_row(p, mask, num_threads,
               [&](int64_t batch, int64_t i, int64_t head, const RowResult& x) {
                 const int64_t row = row_in_batch(p.sequences_q, batch, i);
                 const int64_t at = (row * p.heads_q + head) * p.head_dim_v;
                 std::copy_n(x.out, p.head_dim_v, &result.out[at]);
                 std::copy_n(x.out_bound, p.head_dim_v, &result.out_bound[at]);
                 const int64_t at_lse = (lse_batches * batch * p.heads_q + head) * lse_rows + row -
                                        lse_batches * batch * lse_rows;
                 result.lse[at_lse] = x.lse;
                 result.lse_bound[at_lse] = static_cast<float>(x.lse_bound);
                 if (!p.max_logits.wanted) return;
                 logits.values[at_lse] = x.largest;
                 logits.bound[at_lse] = static_cast<float>(x.largest_bound);
               });
  if (p.max_logits.wanted)
    result.added["max_logits"] =
        p.max_logits.of_heads ? largest_of_heads(logits, p.heads_q, lse_rows) : std::move(logits);
  return result;
}

}  // namespace flash3
