// For each row i of a head, over the keys j that it sees:
//
//   p = softmax(scale · q·kⱼ)              dp_j = dout·vⱼ
//   ds_j = p_j · (dp_j − Σ p·dp + dlse)    the Jacobian of softmax and of log-sum-exp
//   dq = scale · Σ ds_j·kⱼ     dkⱼ += scale · ds_j·q     dvⱼ += p_j·dout
//
// A sink is one more score with a value of 0: its dp is 0, and its ds is summed up over the rows.
// A softcap's derivative multiplies ds.
//
// Rows go in groups that share the loads of K and V; one worker has all the query heads of a KV
// head, so that dK and dV are summed in one order whatever the number of threads.
#include "cpu/attention_backward_ref.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>

#include "core/convert.hpp"
#include "cpu/one_sequence.hpp"
#include "cpu/parallel.hpp"
#include "cpu/reference_math.hpp"

namespace flash3 {
namespace {

constexpr int kRows = 8;          // rows that go together
constexpr Index kKeyBlock = 128;  // keys whose dot products are summed together

template <class Real>
void load_row(const TensorView& t, flash3_dtype dtype, int64_t batch, int64_t seq, int64_t head,
              Real* to) {
  const int64_t first = batch * t.stride_batch + seq * t.stride_seq + head * t.stride_head;
  for (int64_t d = 0; d < t.dim; ++d) to[d] = load_float(t.data, dtype, first + d);
}

// K or V of one (batch, head), and the gradient that is summed up for it.
template <class Real>
struct Keys {
  int64_t seq = 0, dim = 0;
  std::vector<Real> rows;      // [seq, dim]
  std::vector<Real> columns;   // [dim, seq]
  std::vector<Real> gradient;  // [seq, dim]
  std::vector<double> terms;   // [seq]: see ReferenceBackward
  Real largest = 0;            // |element|, of the finite ones

  void load(const TensorView& t, flash3_dtype dtype, int64_t batch, int64_t head) {
    seq = t.seq, dim = t.dim;
    rows.resize(seq * dim);
    columns.resize(seq * dim);
    gradient.assign(seq * dim, 0);
    terms.assign(seq, 0);
    largest = 0;
    for (int64_t j = 0; j < seq; ++j) {
      load_row(t, dtype, batch, j, head, &rows[j * dim]);
      for (int64_t d = 0; d < dim; ++d) {
        columns[d * seq + j] = rows[j * dim + d];
        if (std::isfinite(rows[j * dim + d]))
          largest = std::max(largest, std::abs(rows[j * dim + d]));
      }
    }
  }

  // products[row][j] = Σ_d x[row][d] · rows[j][d]
  void dot_products(const Real (&x)[kRows][kMaxHeadDim], Range keys,
                    std::vector<Real> (&products)[kRows]) const {
    for (Index block = keys.begin; block < keys.end; block += kKeyBlock) {
      const Index count = std::min(kKeyBlock, keys.end - block);
      Real sum[kRows][kKeyBlock] = {};
      for (int64_t d = 0; d < dim; ++d)
        for (int row = 0; row < kRows; ++row)
          for (Index j = 0; j < count; ++j) sum[row][j] += x[row][d] * columns[d * seq + block + j];
      for (int row = 0; row < kRows; ++row) std::copy_n(sum[row], count, &products[row][block]);
    }
  }
};

template <class Real>
void add_scaled(Real factor, const Real* x, int64_t count, Real* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * x[i];
}

// The largest of finite terms.
void raise(double* largest, double value) {
  if (std::isfinite(value)) *largest = std::max(*largest, value);
}

// The sum of finite terms.
void raise_by(double* sum, double term) {
  if (std::isfinite(term)) *sum += term;
}

template <class Real, bool kNaive>
class Backward {
 public:
  explicit Backward(const BackwardProblem& problem) : p_(problem), mask_(problem.mask()) {
    for (auto* rows : {&p_rows_, &ds_rows_, &slope_rows_})
      for (auto& row : *rows) row.resize(problem.seq_k);
  }

  // The gradients of one KV head and of its query heads, row by row to store.dq, dk and dv(batch,
  // seq, head, values), and of the sink to store.dsink(batch, head, value, terms).
  template <class Store>
  void head(int64_t batch, int64_t kv_head, const Store& store) {
    k_.load(p_.k, p_.dtype, batch, kv_head);
    v_.load(p_.v, p_.dtype, batch, kv_head);
    const int64_t group = p_.queries_per_kv_head();
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      dsink_ = 0, dsink_terms_ = 0;
      for (Index begin = 0; begin < p_.seq_q; begin += kRows)
        rows(batch, head, {begin, std::min<Index>(begin + kRows, p_.seq_q)}, store);
      store.dsink(batch, head, dsink_, dsink_terms_);
    }
    for (Real& x : k_.gradient) x *= Real(p_.softmax_scale);
    for (int64_t j = 0; j < p_.seq_k; ++j) {
      raise(&dk_terms, k_.terms[j]);
      raise(&dv_terms, v_.terms[j]);
      store.dk(batch, j, kv_head, &k_.gradient[j * p_.head_dim]);
      store.dv(batch, j, kv_head, &v_.gradient[j * p_.head_dim_v]);
    }
  }

  double dq_terms = 0, dk_terms = 0, dv_terms = 0;  // of the heads so far

 private:
  template <class Store>
  void rows(int64_t batch, int64_t head, Range rows, const Store& store) {
    const int count = static_cast<int>(rows.size());
    for (int row = 0; row < count; ++row) {
      load_row(p_.q, p_.dtype, batch, rows.begin + row, head, q_[row]);
      load_row(p_.dout, p_.dtype, batch, rows.begin + row, head, dout_[row]);
      std::fill_n(dq_[row], p_.head_dim, Real(0));
    }
    const Range any = mask_.keys(rows, p_.seq_k);
    k_.dot_products(q_, any, p_rows_);
    v_.dot_products(dout_, any, ds_rows_);
    for (int row = 0; row < count; ++row)
      seen_[row] = softmax_gradient(batch, head, rows.begin + row, row);

    for (Index j = any.begin; j < any.end; ++j)
      for (int row = 0; row < count; ++row) {
        if (j < seen_[row].begin || j >= seen_[row].end) continue;  // not even times zero
        const Real p = p_rows_[row][j], ds = ds_rows_[row][j];
        add_scaled(ds, &k_.rows[j * p_.head_dim], p_.head_dim, dq_[row]);
        add_scaled(ds, q_[row], p_.head_dim, &k_.gradient[j * p_.head_dim]);
        add_scaled(p, dout_[row], p_.head_dim_v, &v_.gradient[j * p_.head_dim_v]);
      }
    for (int row = 0; row < count; ++row) {
      for (int d = 0; d < p_.head_dim; ++d) dq_[row][d] *= Real(p_.softmax_scale);
      store.dq(batch, rows.begin + row, head, dq_[row]);
    }
  }

  // Of one row: scores and dp become probabilities and ds. Returns the keys that it sees.
  Range softmax_gradient(int64_t batch, int64_t head, Index i, int row) {
    const Range seen = mask_.keys({i, i + 1}, p_.seq_k);
    Real *p = p_rows_[row].data(), *ds = ds_rows_[row].data();
    Real* slope = slope_rows_[row].data();
    for (Index j = seen.begin; j < seen.end; ++j) {
      p[j] = score_of(p[j], p_, [&](Real x) { return round(x); });
      slope[j] = softcap_slope(p[j], p_);
    }
    const Real sink = static_cast<Real>(sink_of(p_, head));
    const Real p_sink = round(sink_weight(sink, softmax(p, seen, sink)));
    for (Index j = seen.begin; j < seen.end; ++j) p[j] = round(p[j]), ds[j] = round(ds[j]);

    Real mean = 0;
    if (kNaive) {
      Real out[kMaxHeadDim];
      load_row(p_.out, p_.dtype, batch, i, head, out);
      for (int d = 0; d < p_.head_dim_v; ++d) mean += dout_[row][d] * out[d];
    } else {
      for (Index j = seen.begin; j < seen.end; ++j) mean += p[j] * ds[j];
    }
    const Real dlse =
        p_.dlse.wanted
            ? Real(p_.dlse.data[batch * p_.dlse.stride_batch + head * p_.dlse.stride_head + i])
            : Real(0);
    double dq_terms_of_row = 0;
    Real largest_q = 0, largest_dout = 0;
    for (int d = 0; d < p_.head_dim; ++d) largest_q = std::max(largest_q, std::abs(q_[row][d]));
    for (int d = 0; d < p_.head_dim_v; ++d)
      largest_dout = std::max(largest_dout, std::abs(dout_[row][d]));
    for (Index j = seen.begin; j < seen.end; ++j) {
      const double terms =
          double(p[j]) * (std::abs(ds[j]) + std::abs(mean) + std::abs(dlse)) * p_.softmax_scale;
      dq_terms_of_row += terms;
      k_.terms[j] += terms * largest_q;
      v_.terms[j] += p[j] * largest_dout;
      ds[j] = round(round(p[j] * (ds[j] - mean + dlse)) * slope[j]);
    }
    dsink_ += round(p_sink * (dlse - mean));
    raise_by(&dsink_terms_, double(p_sink) * (std::abs(mean) + std::abs(dlse)));
    raise(&dq_terms, dq_terms_of_row * k_.largest);
    return seen;
  }

  // What a plain implementation keeps in the tensors' dtype.
  Real round(Real x) const {
    return kNaive && p_.dtype != FLASH3_FLOAT32
               ? static_cast<Real>(rounded(static_cast<float>(x), p_.dtype))
               : x;
  }

  const BackwardProblem& p_;
  const Mask mask_;
  Keys<Real> k_, v_;
  Real q_[kRows][kMaxHeadDim] = {}, dout_[kRows][kMaxHeadDim] = {}, dq_[kRows][kMaxHeadDim];
  std::vector<Real> p_rows_[kRows];      // scores, then probabilities
  std::vector<Real> ds_rows_[kRows];     // dp, then ds
  std::vector<Real> slope_rows_[kRows];  // of the softcap
  Range seen_[kRows];
  Real dsink_ = 0;
  double dsink_terms_ = 0;
};

// done(worker's Backward) once per worker, one at a time.
template <class Real, bool kNaive, class Store, class Done>
void for_each_head_of_one_length(const BackwardProblem& p, int num_threads, const Store& store,
                                 const Done& done) {
  if (p.is_empty()) return;
  const int64_t tasks = p.batch * p.heads_k;
  const int threads = num_threads > 0 ? num_threads : available_threads();
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  run_workers(static_cast<int>(std::clamp<int64_t>(tasks, 1, threads)), [&](int) {
    Backward<Real, kNaive> backward(p);
    for (int64_t task; (task = next.fetch_add(1)) < tasks;)
      backward.head(task / p.heads_k, task % p.heads_k, store);
    const std::lock_guard lock(mutex);
    done(backward);
  });
}

// Of every sequence. Rows count from the first one of their sequence.
template <class Real, bool kNaive, class Store, class Done>
void for_each_head(const BackwardProblem& p, int num_threads, const Store& store,
                   const Done& done) {
  if (!p.is_ragged()) return for_each_head_of_one_length<Real, kNaive>(p, num_threads, store, done);
  struct OfSequence {
    const Store& store;
    int64_t b;
    void dq(int64_t, int64_t i, int64_t h, const Real* x) const { store.dq(b, i, h, x); }
    void dk(int64_t, int64_t i, int64_t h, const Real* x) const { store.dk(b, i, h, x); }
    void dv(int64_t, int64_t i, int64_t h, const Real* x) const { store.dv(b, i, h, x); }
    void dsink(int64_t, int64_t h, Real x, double terms) const { store.dsink(b, h, x, terms); }
  };
  for (int64_t b = 0; b < p.batch; ++b)
    for_each_head_of_one_length<Real, kNaive>(one_sequence(p, b), num_threads, OfSequence{store, b},
                                              done);
}

// Of each (batch, head), to be summed in one order whatever the number of threads.
template <class Real>
struct SinkParts {
  std::vector<Real> value;
  std::vector<double> terms;

  explicit SinkParts(const BackwardProblem& p)
      : value(p.batch * p.heads_q), terms(p.batch * p.heads_q) {}
  // The sums of each head to add(head, sum, terms).
  template <class Add>
  void sum(const BackwardProblem& p, const Add& add) const {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      Real sum = 0;
      double sum_of_terms = 0;
      for (int64_t b = 0; b < p.batch; ++b) {
        sum += value[b * p.heads_q + h];
        sum_of_terms += terms[b * p.heads_q + h];
      }
      add(h, sum, sum_of_terms);
    }
  }
};

}  // namespace

ReferenceBackward attention_backward_ref(const BackwardProblem& p, int num_threads) {
  ReferenceBackward result;
  result.dq.resize(rows_in_batch(p.sequences_q, p.batch) * p.heads_q * p.head_dim);
  result.dk.resize(rows_in_batch(p.sequences_k, p.batch) * p.heads_k * p.head_dim);
  result.dv.resize(rows_in_batch(p.sequences_k, p.batch) * p.heads_k * p.head_dim_v);
  struct Store {
    const BackwardProblem& p;
    ReferenceBackward& to;
    SinkParts<double>& sinks;
    static double* row(std::vector<double>& all, const Sequences& s, const TensorView& t, int64_t b,
                       int64_t i, int64_t h) {
      return all.data() + (row_in_batch(s, b, i) * t.heads + h) * t.dim;
    }
    void dq(int64_t b, int64_t i, int64_t h, const double* x) const {
      std::copy_n(x, p.head_dim, row(to.dq, p.sequences_q, p.dq, b, i, h));
    }
    void dk(int64_t b, int64_t i, int64_t h, const double* x) const {
      std::copy_n(x, p.head_dim, row(to.dk, p.sequences_k, p.dk, b, i, h));
    }
    void dv(int64_t b, int64_t i, int64_t h, const double* x) const {
      std::copy_n(x, p.head_dim_v, row(to.dv, p.sequences_k, p.dv, b, i, h));
    }
    void dsink(int64_t b, int64_t h, double x, double terms) const {
      sinks.value[b * p.heads_q + h] = x;
      sinks.terms[b * p.heads_q + h] = terms;
    }
  };
  SinkParts<double> sinks(p);
  for_each_head<double, false>(p, num_threads, Store{p, result, sinks}, [&](const auto& backward) {
    result.dq_terms = std::max(result.dq_terms, backward.dq_terms);
    result.dk_terms = std::max(result.dk_terms, backward.dk_terms);
    result.dv_terms = std::max(result.dv_terms, backward.dv_terms);
  });
  if (!p.sink.given) return result;
  result.dsink.resize(p.heads_q);
  sinks.sum(p, [&](int64_t h, double sum, double terms) {
    result.dsink[h] = sum;
    result.dsink_terms = std::max(result.dsink_terms, terms);
  });
  return result;
}

void attention_backward_naive(const BackwardProblem& p, int num_threads) {
  struct Store {
    const BackwardProblem& p;
    SinkParts<float>& sinks;
    void row(const TensorView& t, const Sequences& s, int64_t b, int64_t i, int64_t h,
             const float* x) const {
      const int64_t first =
          b * t.stride_batch + (rows_of(s, b).first + i) * t.stride_seq + h * t.stride_head;
      for (int64_t d = 0; d < t.dim; ++d) store_float(t.data, p.dtype, first + d, x[d]);
    }
    void dq(int64_t b, int64_t i, int64_t h, const float* x) const {
      row(p.dq, p.sequences_q, b, i, h, x);
    }
    void dk(int64_t b, int64_t i, int64_t h, const float* x) const {
      row(p.dk, p.sequences_k, b, i, h, x);
    }
    void dv(int64_t b, int64_t i, int64_t h, const float* x) const {
      row(p.dv, p.sequences_k, b, i, h, x);
    }
    void dsink(int64_t b, int64_t h, float x, double) const { sinks.value[b * p.heads_q + h] = x; }
  };
  SinkParts<float> sinks(p);
  for_each_head<float, true>(p, num_threads, Store{p, sinks}, [](const auto&) {});
  if (p.dsink.data)
    sinks.sum(
        p, [&](int64_t h, float sum, double) { store_float(p.dsink.data, p.dsink.dtype, h, sum); });
}

}  // namespace flash3
