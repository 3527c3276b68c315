// SPDX-License-Identifier: Apache-2.0
// The steps of oracle/attention_ref.cpp in float32, with what a plain implementation keeps in the
// tensors' dtype rounded to it.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/quantized_forward.hpp"
#include "oracle/one_sequence.hpp"
#include "oracle/reference_math.hpp"
#include "oracle/reference_rows.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3 {
namespace {

constexpr int kRows = 4;  // rows that go together

// 32 bytes of numbers.
template <class Real>
struct Lanes {
  static constexpr int kCount = 32 / sizeof(Real);
  typedef Real Vector __attribute__((vector_size(32)));
  Vector x = {};
};

// A sum as Hopper's tensor cores make it of FP8 products: 32 of them and what there is already are
// brought to the exponent of the largest, of which 13 bits of fraction stay, the rest is cut off
// (DeepSeek-V3, arXiv:2412.19437, §3.3.2).
struct TensorCoreSum {
  using Vector = Lanes<float>;
  static constexpr int kTerms = 32;

  Vector sum, terms[kTerms] = {};
  int count = 0;

  void add(const Vector& term) {
    terms[count++] = term;
    if (count == kTerms) fold();
  }
  void fold() {
    typedef int Int __attribute__((vector_size(32)));
    typedef float Float __attribute__((vector_size(32)));
    Int largest = Int(sum.x) & 0x7FFFFFFF;  // ordered as sizes are
    for (int i = 0; i < count; ++i) {
      const Int size = Int(terms[i].x) & 0x7FFFFFFF;
      largest = size > largest ? size : largest;
    }
    bool finite = true;
    for (int lane = 0; lane < Vector::kCount; ++lane) finite &= largest[lane] < 0x7F800000;
    if (!finite) {
      for (int i = 0; i < count; ++i) sum.x += terms[i].x;
    } else {
      // Below 2^-100 nothing is cut off: the reciprocal must be a float too.
      const Int exponent = largest & 0x7F800000, least = Int{} + (27 << 23);
      const Int step = (exponent > least ? exponent : least) - (13 << 23);
      const Float per_step = Float((254 << 23) - step);
      Int steps = __builtin_convertvector(sum.x * per_step, Int);
      for (int i = 0; i < count; ++i) steps += __builtin_convertvector(terms[i].x * per_step, Int);
      sum.x = __builtin_convertvector(steps, Float) * Float(step);
    }
    count = 0;
  }
};

// K and V of one (batch, KV head) as Real, in panels of so many keys (K) or columns (V) as a vector
// has lanes.
template <class Real>
class Head {
 public:
  using Vector = Lanes<Real>;
  static constexpr int kLanes = Vector::kCount;

  // tensor_cores: sums are TensorCoreSums.
  Head(const ForwardProblem& problem, bool tensor_cores)
      : problem_(problem),
        tensor_cores_(tensor_cores),
        dim_(problem.score_dim()),
        k_(ceil_div(problem.seq_k, kLanes) * dim_),
        v_(ceil_div(problem.head_dim_v, kLanes) * problem.seq_k) {}

  void load(int64_t batch, int64_t head) {
    if (batch == batch_ && head == head_) return;
    batch_ = batch, head_ = head;
    const TensorView &k = problem_.k, &v = problem_.v;
    const flash3_dtype dtype = problem_.kv_dtype;
    for (int64_t j = 0; j < problem_.seq_k; ++j) {
      const int64_t k_row = batch * k.stride_batch + j * k.stride_seq + head * k.stride_head;
      const int64_t v_row = batch * v.stride_batch + j * v.stride_seq + head * v.stride_head;
      const Real k_scale = problem_.k_scale.at_row(batch, head, j);
      const Real v_scale = problem_.v_scale.at_row(batch, head, j);
      for (int64_t d = 0; d < k.dim; ++d)
        k_[j / kLanes * dim_ + d].x[j % kLanes] = k_scale * load_float(k.data, dtype, k_row + d);
      for (int64_t d = 0; d < problem_.qv.dim; ++d)  // the values are keys too
        k_[j / kLanes * dim_ + k.dim + d].x[j % kLanes] = load_float(v.data, dtype, v_row + d);
      for (int64_t d = 0; d < v.dim; ++d)
        v_[d / kLanes * v.seq + j].x[d % kLanes] = v_scale * load_float(v.data, dtype, v_row + d);
    }
  }

  // scores[row][key] = Σ_d q[row][d] · k[key][d], for the panels that hold these keys.
  void dot_products(const Real (&q)[kRows][kMaxScoreDim], IndexRange keys,
                    std::vector<Vector> (&scores)[kRows]) const {
    if (keys.empty()) return;
    for (int64_t panel = keys.begin / kLanes; panel * kLanes < keys.end; ++panel) {
      const Vector* k = &k_[panel * dim_];
      if constexpr (std::is_same_v<Real, float>) {
        if (tensor_cores_) {
          for (int row = 0; row < kRows; ++row)
            scores[row][panel] = tensor_core_sum({}, 0, dim_, q[row], k);
          continue;
        }
      }
      Vector sum[kRows] = {};
      for (int d = 0; d < dim_; ++d)
        for (int row = 0; row < kRows; ++row) sum[row].x += q[row][d] * k[d].x;
      for (int row = 0; row < kRows; ++row) scores[row][panel] = sum[row];
    }
  }

  // out[row][d] += Σ_key weights[row][key] · v[key][d] for kCount rows from `first`, over exactly
  // these keys: one that a row does not see must not even be multiplied by zero, as V may be NaN.
  template <int kCount>
  void weighted_sum(const Real* const (&weights)[kRows], int first, IndexRange keys,
                    Vector (&out)[kRows][kMaxValueDim / kLanes]) const {
    for (int64_t panel = 0; panel * kLanes < problem_.head_dim_v; ++panel) {
      const Vector* v = v_.data() + panel * problem_.seq_k;
      if constexpr (std::is_same_v<Real, float>) {
        if (tensor_cores_) {
          for (int row = 0; row < kCount; ++row)
            out[first + row][panel] = tensor_core_sum(out[first + row][panel], keys.begin, keys.end,
                                                      weights[first + row], v);
          continue;
        }
      }
      Vector sum[kCount];
      for (int row = 0; row < kCount; ++row) sum[row] = out[first + row][panel];
      for (int64_t j = keys.begin; j < keys.end; ++j)
        for (int row = 0; row < kCount; ++row) sum[row].x += weights[first + row][j] * v[j].x;
      for (int row = 0; row < kCount; ++row) out[first + row][panel] = sum[row];
    }
  }

 private:
  // sum + Σ factors[i] · x[i]
  static Vector tensor_core_sum(const Vector& sum, int64_t begin, int64_t end, const Real* factors,
                                const Vector* x) {
    TensorCoreSum total{sum};
    for (int64_t i = begin; i < end; ++i) {
      Vector term;
      term.x = factors[i] * x[i].x;
      total.add(term);
    }
    total.fold();
    return total.sum;
  }

  const ForwardProblem& problem_;
  const bool tensor_cores_;
  const int dim_;  // of keys, with what qv meets
  std::vector<Vector> k_, v_;
  int64_t batch_ = -1, head_ = -1;
};

// What passes through a tensor on the way: nothing; or scores and probabilities, in the problem's
// dtype; in FP8 the weights exp(score − max) alone, times kE4m3WeightScale, and for a call on
// Hopper sums are those of its tensor cores; plainly in FP8 the probabilities as they are.
enum class Rounding { kExact, kRounded, kFp8, kPlainFp8 };

template <class Real>
struct RowResult {
  const Real* out;
  Real lse, largest;  // of the scores
};

// Called with batch, row, head and what the row has.
template <class Real>
using Store = std::function<void(int64_t, int64_t, int64_t, const RowResult<Real>&)>;

// Computes rows and hands each to store.
template <class Real>
class RowGroup {
 public:
  RowGroup(const ForwardProblem& problem, Rounding precision, const MaskPairs* pairs,
           const Store<Real>& store)
      : problem_(problem),
        precision_(precision),
        store_(store),
        pairs_(pairs),
        kv_(problem, precision == Rounding::kFp8 && problem.backend == FLASH3_BACKEND_HOPPER),
        mask_(visible_keys(problem)) {
    for (auto& row : scores_) row.resize((problem.seq_k + Kv::kLanes - 1) / Kv::kLanes);
  }

  // rows: at most kRows of them.
  void compute(int64_t batch, int64_t head, IndexRange rows) {
    const ForwardProblem& p = problem_;
    kv_.load(batch, head / p.queries_per_kv_head());
    mask_ = visible_keys(p, pairs_, batch, head);
    const int64_t q_head = batch * p.q.stride_batch + head * p.q.stride_head;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const Real scale = p.q_scale.at(batch, head, i / kScaleBlock);
      for (int d = 0; d < p.head_dim; ++d)
        q_[i - rows.begin][d] =
            scale * load_float(p.q.data, p.dtype, q_head + i * p.q.stride_seq + d);
      const int64_t qv = batch * p.qv.stride_batch + head * p.qv.stride_head + i * p.qv.stride_seq;
      for (int64_t d = 0; d < p.qv.dim; ++d)
        q_[i - rows.begin][p.head_dim + d] = load_float(p.qv.data, p.dtype, qv + d);
    }
    kv_.dot_products(q_, mask_.keys(rows.begin, rows.end), scores_);

    IndexRange seen[kRows], seen_by_all{0, rows.size() == kRows ? p.seq_k : 0};
    const Real* weights[kRows];
    Real lse[kRows], largest[kRows];
    for (int row = 0; row < rows.size(); ++row) {
      Real* s = scores_[row].empty() ? nullptr : reinterpret_cast<Real*>(scores_[row].data());
      seen[row] = mask_.keys(rows.begin + row);
      const RowScores scores(p, mask_, batch, head, rows.begin + row);
      for (int64_t j = seen[row].begin; j < seen[row].end; ++j)
        s[j] = scores.of(s[j], j, [&](Real x) { return round(x); }).value;
      mask_.for_each_hidden(rows.begin + row,
                            [&](int64_t j) { s[j] = -std::numeric_limits<Real>::infinity(); });
      largest[row] = largest_of(s, seen[row]);
      const Real sink = static_cast<Real>(sink_of(p, head));
      if (precision_ == Rounding::kFp8) {
        lse[row] = fp8_softmax(s, seen[row], sink);
      } else {
        lse[row] = softmax(s, seen[row], sink);
        for (int64_t j = seen[row].begin; j < seen[row].end; ++j)
          s[j] = precision_ == Rounding::kPlainFp8
                     ? static_cast<Real>(rounded(static_cast<float>(s[j]), FLASH3_FLOAT8_E4M3))
                     : round(s[j]);
      }
      const RowDropout dropout(p, batch, head, rows.begin + row);
      for (int64_t j = seen[row].begin; dropout.given() && j < seen[row].end; ++j)
        s[j] = round(s[j] * static_cast<Real>(dropout.of(j)));
      weights[row] = s;
      seen_by_all = {std::max(seen_by_all.begin, seen[row].begin),
                     std::min(seen_by_all.end, seen[row].end)};
    }

    for (auto& row : out_) std::fill(std::begin(row), std::end(row), typename Kv::Vector{});
    if (!seen_by_all.empty()) kv_.template weighted_sum<kRows>(weights, 0, seen_by_all, out_);
    for (int row = 0; row < rows.size(); ++row) {
      if (seen_by_all.empty()) {
        kv_.template weighted_sum<1>(weights, row, seen[row], out_);
      } else {
        kv_.template weighted_sum<1>(weights, row, {seen[row].begin, seen_by_all.begin}, out_);
        kv_.template weighted_sum<1>(weights, row, {seen_by_all.end, seen[row].end}, out_);
      }
      store_(batch, rows.begin + row, head,
             {reinterpret_cast<const Real*>(out_[row]), lse[row], largest[row]});
    }
  }

 private:
  using Kv = Head<Real>;

  // A score.
  Real round(Real x) const {
    return precision_ == Rounding::kRounded
               ? static_cast<Real>(rounded(static_cast<float>(x), problem_.dtype))
               : x;
  }

  const ForwardProblem& problem_;
  const Rounding precision_;
  const Store<Real>& store_;
  const MaskPairs* const pairs_;
  Kv kv_;
  VisibleKeys mask_;
  std::vector<typename Kv::Vector> scores_[kRows];
  Real q_[kRows][kMaxScoreDim] = {};
  typename Kv::Vector out_[kRows][kMaxValueDim / Kv::kLanes];
};

void for_each_row_of_one_length(const ForwardProblem& p, Rounding precision, const MaskPairs* mask,
                                int num_threads, const Store<float>& store) {
  for_each_row_group<kRows>(p, num_threads,
                            [&] { return RowGroup<float>(p, precision, mask, store); });
}

// Every row of every sequence. row counts from the first one of its sequence.
void for_each_row(const ForwardProblem& p, Rounding precision, const MaskPairs* mask,
                  int num_threads, const Store<float>& store) {
  if (!p.is_ragged() && !p.tree.given)
    return for_each_row_of_one_length(p, precision, mask, num_threads, store);
  for (int64_t b = 0; b < p.batch; ++b)
    for_each_row_of_one_length(one_sequence(p, b), precision, PairsOfSequence(mask, b).get(),
                               num_threads,
                               [&](int64_t, int64_t row, int64_t head, const RowResult<float>& x) {
                                 store(b, row, head, x);
                               });
}

// The largest logits of rows, by way of which those of heads are made.
class MaxLogits {
 public:
  explicit MaxLogits(const ForwardProblem& p) : p_(p), rows_(p.max_logits) {
    if (!p.max_logits.of_heads || !p.max_logits.data) return;
    const Sequences& q = p.sequences_q;
    const int64_t count = rows_in_batch(q, p.batch);
    values_.assign(static_cast<size_t>(count * p.heads_q), kNothing);
    rows_ = {values_.data(), true, q.packed ? 0 : q.rows, count};
  }
  void store(int64_t batch, int64_t row, int64_t head, float largest) {
    if (rows_.data)
      rows_.data[batch * rows_.stride_batch + head * rows_.stride_head + row] = largest;
  }
  void finish() const {
    if (!p_.max_logits.of_heads || !p_.max_logits.data) return;
    for (int64_t h = 0; h < p_.heads_q; ++h)
      p_.max_logits.data[h] =
          largest_of(values_.data() + h * rows_.stride_head, {0, rows_.stride_head});
  }

 private:
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const ForwardProblem& p_;
  LseView rows_;
  std::vector<float> values_;
};

void naive(const ForwardProblem& p, Rounding precision, int num_threads,
           const MaskPairs* mask = nullptr) {
  check_pairs(p, mask);
  MaxLogits max_logits(p);
  const auto store = [&](int64_t batch, int64_t i, int64_t head, const RowResult<float>& x) {
    const int64_t row = rows_of(p.sequences_q, batch).first + i;
    const int64_t first =
        batch * p.out.stride_batch + row * p.out.stride_seq + head * p.out.stride_head;
    for (int d = 0; d < p.head_dim_v; ++d)
      store_float(p.out.data, p.out_dtype, first + d, x.out[d]);
    if (p.lse.data) p.lse.data[batch * p.lse.stride_batch + head * p.lse.stride_head + row] = x.lse;
    max_logits.store(batch, row, head, x.largest);
  };
  for_each_row(p, precision, mask, num_threads, store);
  max_logits.finish();
}

}  // namespace

void attention_naive(const ForwardProblem& p, int num_threads, const MaskPairs* mask) {
  if (p.has_cache() || p.rotates)
    return attention_naive(GatheredCache(p).problem(), num_threads, mask);
  switch (p.dtype) {
    case FLASH3_FLOAT32: return naive(p, Rounding::kExact, num_threads, mask);
    case FLASH3_FLOAT8_E4M3: return naive(p, Rounding::kFp8, num_threads, mask);
    default: return naive(p, Rounding::kRounded, num_threads, mask);
  }
}

void attention_plain_fp8(const ForwardProblem& p, int num_threads) {
  naive(p, Rounding::kPlainFp8, num_threads);
}

void attention_naive_fp8(ForwardProblem problem, int num_threads) {
  problem.workspace = nullptr;
  std::vector<std::byte> memory(quantized_forward(problem).tensor_bytes);
  problem.workspace = memory.data();
  const QuantizedForward both = quantized_forward(problem);
  PlanPointer<QuantizeProblem> quantize;
  if (!cpu_backend().plan(both.quantize, &quantize).ok() || !quantize->launch(both.quantize).ok())
    throw std::runtime_error("attention_naive_fp8: the CPU cannot quantize this problem");
  attention_naive(both.forward, num_threads);
}

}  // namespace flash3
