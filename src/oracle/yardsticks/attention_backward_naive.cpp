// SPDX-License-Identifier: Apache-2.0
// The formulas of oracle/attention_backward_ref.cpp in float32, with what a plain implementation
// keeps in the tensors' dtype rounded to it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/convert.hpp"
#include "oracle/one_sequence.hpp"
#include "oracle/reference_math.hpp"
#include "oracle/reference_rows.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3 {
namespace {

constexpr int kRows = 8;            // rows that go together
constexpr int64_t kKeyBlock = 128;  // keys whose dot products are summed together

void load_row(const TensorView& t, flash3_dtype dtype, int64_t batch, int64_t seq, int64_t head,
              float* to) {
  const int64_t first = batch * t.stride_batch + seq * t.stride_seq + head * t.stride_head;
  for (int64_t d = 0; d < t.dim; ++d) to[d] = load_float(t.data, dtype, first + d);
}

// K or V of one (batch, head), and the gradient that is summed up for it.
struct Keys {
  int64_t seq = 0, dim = 0;
  std::vector<float> rows;      // [seq, dim]
  std::vector<float> columns;   // [dim, seq]
  std::vector<float> gradient;  // [seq, dim]

  void load(const TensorView& t, flash3_dtype dtype, int64_t batch, int64_t head) {
    seq = t.seq, dim = t.dim;
    rows.resize(seq * dim);
    columns.resize(seq * dim);
    gradient.assign(seq * dim, 0);
    for (int64_t j = 0; j < seq; ++j) {
      load_row(t, dtype, batch, j, head, &rows[j * dim]);
      for (int64_t d = 0; d < dim; ++d) columns[d * seq + j] = rows[j * dim + d];
    }
  }

  // products[row][j] = Σ_d x[row][d] · rows[j][d]
  void dot_products(const float (&x)[kRows][kMaxHeadDim], IndexRange keys,
                    std::vector<float> (&products)[kRows]) const {
    for (int64_t block = keys.begin; block < keys.end; block += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, keys.end - block);
      float sum[kRows][kKeyBlock] = {};
      for (int64_t d = 0; d < dim; ++d)
        for (int row = 0; row < kRows; ++row)
          for (int64_t j = 0; j < count; ++j)
            sum[row][j] += x[row][d] * columns[d * seq + block + j];
      for (int row = 0; row < kRows; ++row) std::copy_n(sum[row], count, &products[row][block]);
    }
  }
};

void add_scaled(float factor, const float* x, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * x[i];
}

class Backward {
 public:
  Backward(const BackwardProblem& problem, const MaskPairs* pairs)
      : p_(problem), pairs_(pairs), mask_(visible_keys(problem)) {
    for (auto* rows : {&p_rows_, &ds_rows_, &slope_rows_})
      for (auto& row : *rows) row.resize(problem.seq_k);
  }

  // The gradients of one KV head and of its query heads, row by row to store.dq, dk and dv(batch,
  // seq, head, values), and of the sink to store.dsink(batch, head, value).
  template <class Store>
  void head(int64_t batch, int64_t kv_head, const Store& store) {
    k_.load(p_.k, p_.dtype, batch, kv_head);
    v_.load(p_.v, p_.dtype, batch, kv_head);
    const int64_t group = p_.queries_per_kv_head();
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      dsink_ = 0;
      mask_ = visible_keys(p_, pairs_, batch, head);
      for (int64_t begin = 0; begin < p_.seq_q; begin += kRows)
        rows(batch, head, {begin, std::min<int64_t>(begin + kRows, p_.seq_q)}, store);
      store.dsink(batch, head, dsink_);
    }
    for (float& x : k_.gradient) x *= p_.softmax_scale;
    for (int64_t j = 0; j < p_.seq_k; ++j) {
      store.dk(batch, j, kv_head, &k_.gradient[j * p_.head_dim]);
      store.dv(batch, j, kv_head, &v_.gradient[j * p_.head_dim_v]);
    }
  }

 private:
  template <class Store>
  void rows(int64_t batch, int64_t head, IndexRange rows, const Store& store) {
    const int count = static_cast<int>(rows.size());
    for (int row = 0; row < count; ++row) {
      load_row(p_.q, p_.dtype, batch, rows.begin + row, head, q_[row]);
      load_row(p_.dout, p_.dtype, batch, rows.begin + row, head, dout_[row]);
      std::fill_n(dq_[row], p_.head_dim, float(0));
    }
    const IndexRange any = mask_.keys(rows.begin, rows.end);
    k_.dot_products(q_, any, p_rows_);
    v_.dot_products(dout_, any, ds_rows_);
    for (int row = 0; row < count; ++row)
      seen_[row] = softmax_gradient(batch, head, rows.begin + row, row);

    for (int64_t j = any.begin; j < any.end; ++j)
      for (int row = 0; row < count; ++row) {
        if (j < seen_[row].begin || j >= seen_[row].end) continue;      // not even times zero
        if (mask_.pairs && !mask_.sees(rows.begin + row, j)) continue;  // nor here
        const float p = p_rows_[row][j], ds = ds_rows_[row][j];
        add_scaled(ds, &k_.rows[j * p_.head_dim], p_.head_dim, dq_[row]);
        add_scaled(ds, q_[row], p_.head_dim, &k_.gradient[j * p_.head_dim]);
        add_scaled(p, dout_[row], p_.head_dim_v, &v_.gradient[j * p_.head_dim_v]);
      }
    for (int row = 0; row < count; ++row) {
      for (int d = 0; d < p_.head_dim; ++d) dq_[row][d] *= p_.softmax_scale;
      store.dq(batch, rows.begin + row, head, dq_[row]);
    }
  }

  // Makes probabilities and ds from one row of scores and dp. Returns the keys that it sees.
  IndexRange softmax_gradient(int64_t batch, int64_t head, int64_t i, int row) {
    const IndexRange seen = mask_.keys(i);
    float *p = p_rows_[row].data(), *ds = ds_rows_[row].data();
    float* slope = slope_rows_[row].data();
    const RowScores scores(p_, mask_, batch, head, i);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const auto score = scores.of(p[j], j, [&](float x) { return round(x); });
      p[j] = score.value, slope[j] = score.slope;
    }
    mask_.for_each_hidden(i, [&](int64_t j) { p[j] = -std::numeric_limits<float>::infinity(); });
    const float sink = sink_of(p_, head);
    const float p_sink = round(sink_weight(sink, softmax(p, seen, sink)));
    const RowDropout dropout(p_, batch, head, i);
    for (int64_t j = seen.begin; j < seen.end; ++j)
      p[j] = round(p[j]), ds[j] = round(ds[j] * static_cast<float>(dropout.of(j)));

    float mean = 0, out[kMaxHeadDim];
    load_row(p_.out, p_.dtype, batch, i, head, out);
    for (int d = 0; d < p_.head_dim_v; ++d) mean += dout_[row][d] * out[d];
    const float dlse =
        p_.dlse.wanted ? p_.dlse.data[batch * p_.dlse.stride_batch + head * p_.dlse.stride_head + i]
                       : 0.f;
    for (int64_t j = seen.begin; j < seen.end; ++j)
      ds[j] = round(round(p[j] * (ds[j] - mean + dlse)) * slope[j]);
    for (int64_t j = seen.begin; dropout.given() && j < seen.end; ++j)
      p[j] = round(p[j] * static_cast<float>(dropout.of(j)));
    dsink_ += round(p_sink * (dlse - mean));
    return seen;
  }

  // What a plain implementation keeps in the tensors' dtype.
  float round(float x) const { return p_.dtype != FLASH3_FLOAT32 ? rounded(x, p_.dtype) : x; }

  const BackwardProblem& p_;
  const MaskPairs* const pairs_;
  VisibleKeys mask_;
  Keys k_, v_;
  float q_[kRows][kMaxHeadDim] = {}, dout_[kRows][kMaxHeadDim] = {}, dq_[kRows][kMaxHeadDim];
  std::vector<float> p_rows_[kRows];      // scores, then probabilities
  std::vector<float> ds_rows_[kRows];     // dp, then ds
  std::vector<float> slope_rows_[kRows];  // of the softcap
  IndexRange seen_[kRows];
  float dsink_ = 0;
};

template <class Store>
void for_each_head_of_one_length(const BackwardProblem& p, const MaskPairs* mask, int num_threads,
                                 const Store& store) {
  for_each_kv_head(p, num_threads, [&] {
    return [&store, backward = Backward(p, mask)](int64_t b, int64_t h) mutable {
      backward.head(b, h, store);
    };
  });
}

// Every sequence. Rows count from the first one of their sequence.
template <class Store>
void for_each_head(const BackwardProblem& p, const MaskPairs* mask, int num_threads,
                   const Store& store) {
  if (!p.is_ragged()) return for_each_head_of_one_length(p, mask, num_threads, store);
  struct OfSequence {
    const Store& store;
    int64_t b;
    void dq(int64_t, int64_t i, int64_t h, const float* x) const { store.dq(b, i, h, x); }
    void dk(int64_t, int64_t i, int64_t h, const float* x) const { store.dk(b, i, h, x); }
    void dv(int64_t, int64_t i, int64_t h, const float* x) const { store.dv(b, i, h, x); }
    void dsink(int64_t, int64_t h, float x) const { store.dsink(b, h, x); }
  };
  for (int64_t b = 0; b < p.batch; ++b)
    for_each_head_of_one_length(one_sequence(p, b), PairsOfSequence(mask, b).get(), num_threads,
                                OfSequence{store, b});
}

}  // namespace

void attention_backward_naive(const BackwardProblem& p, int num_threads, const MaskPairs* mask) {
  check_pairs(p, mask);
  struct Store {
    const BackwardProblem& p;
    std::vector<float>& sinks;  // of each (batch, head): summed in one order
    void row(const TensorView& t, const Sequences& s, int64_t b, int64_t i, int64_t h,
             const float* x) const {
      const int64_t first =
          b * t.stride_batch + (rows_of(s, b).first + i) * t.stride_seq + h * t.stride_head;
      for (int64_t d = 0; d < t.dim; ++d) store_float(t.data, p.gradient_dtype, first + d, x[d]);
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
    void dsink(int64_t b, int64_t h, float x) const { sinks[b * p.heads_q + h] = x; }
  };
  std::vector<float> sinks(p.batch * p.heads_q);
  for_each_head(p, mask, num_threads, Store{p, sinks});
  if (!p.dsink.data) return;
  for (int64_t h = 0; h < p.heads_q; ++h) {
    float sum = 0;
    for (int64_t b = 0; b < p.batch; ++b) sum += sinks[b * p.heads_q + h];
    store_float(p.dsink.data, p.dsink.dtype, h, sum);
  }
}

}  // namespace flash3
