// SPDX-License-Identifier: Apache-2.0
// What the oracles are made of: their three matrix products, the sharing of work among threads, and
// rows of tensors.
//
// The products are plain loops, compiled once for each width of vectors. Tables hold their rows in
// whole cache lines, padded with zeros.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/problem.hpp"
#include "cpu/parallel.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3 {

inline constexpr int kReferenceRows = 8;  // rows that go together and share the loads of the rest

template <class Real>
inline constexpr int kReferenceLanes = 64 / sizeof(Real);  // elements of a cache line

// [rows, columns], zero at first.
template <class Real>
class ReferenceTable {
 public:
  void resize(int64_t rows, int64_t columns) {
    stride_ = round_up(columns, kLanes);
    lines_.assign(static_cast<size_t>(rows * stride_ / kLanes), {});
  }
  Real* operator[](int64_t row) { return data() + row * stride_; }
  const Real* operator[](int64_t row) const { return data() + row * stride_; }
  int64_t stride() const { return stride_; }

 private:
  static constexpr int kLanes = kReferenceLanes<Real>;
  struct alignas(64) Line {
    Real of[kLanes] = {};
  };
  Real* data() { return lines_.empty() ? nullptr : lines_[0].of; }
  const Real* data() const { return lines_.empty() ? nullptr : lines_[0].of; }
  std::vector<Line> lines_;
  int64_t stride_ = 0;
};

// Each over kReferenceRows rows; `rows` of the last two may be 1 too. Columns of keys outside the
// range are neither read nor written, but for those that share a line with one inside.
template <class Real>
struct ReferenceLoops {
  // products[r][j] = Σ_d x[r][d] · panels[j / lanes · dim + d][j % lanes]
  void (*dot_products)(const ReferenceTable<Real>& x, const ReferenceTable<Real>& panels,
                       int64_t dim, IndexRange keys, ReferenceTable<Real>* products);
  // sums[r][d] += Σ_j weights[r][j] · table[j][d], for `rows` rows from `first`
  void (*add_weighted)(int first, int rows, const ReferenceTable<Real>& weights,
                       const ReferenceTable<Real>& table, IndexRange keys,
                       ReferenceTable<Real>* sums);
  // sums[j][d] += Σ_r weights[r][j] · x[r][d], likewise
  void (*add_transposed)(int first, int rows, const ReferenceTable<Real>& weights,
                         const ReferenceTable<Real>& x, IndexRange keys,
                         ReferenceTable<Real>* sums);
};

// For the widest vectors of this machine.
template <class Real>
const ReferenceLoops<Real>& reference_loops();

// How the work of a call whose sequences have one length is shared out among threads: by the oracle
// and by the naive implementation.

// Each worker makes an object by make_rows() and calls its compute(batch, head, rows) for groups of
// kRows rows.
template <int kRows, class MakeRows>
void for_each_row_group(const ForwardProblem& p, int num_threads, const MakeRows& make_rows) {
  if (p.is_empty()) return;
  // A task is a group of rows; workers take runs of tasks, so that they seldom change heads.
  const int64_t groups = ceil_div(p.seq_q, kRows), tasks = p.batch * p.heads_q * groups;
  const int64_t run = std::clamp<int64_t>(tasks / 64, 1, 64);
  const double work = static_cast<double>(tasks) * kRows * static_cast<double>(p.seq_k + 1) *
                      (p.head_dim + p.head_dim_v + 64);
  const int threads = num_threads > 0 ? num_threads : cpu::available_threads();

  std::atomic<int64_t> next{0};
  cpu::run_workers(static_cast<int>(std::clamp<double>(work / 4e6, 1, threads)), [&](int) {
    auto rows = make_rows();
    for (int64_t first; (first = next.fetch_add(run)) < tasks;)
      for (int64_t task = first; task < std::min(first + run, tasks); ++task) {
        const int64_t begin = task % groups * kRows;
        rows.compute(task / groups / p.heads_q, task / groups % p.heads_q,
                     {begin, std::min<int64_t>(begin + kRows, p.seq_q)});
      }
  });
}

// Each worker makes a function by make_head() and calls it with (batch, kv_head).
template <class MakeHead>
void for_each_kv_head(const BackwardProblem& p, int num_threads, const MakeHead& make_head) {
  if (p.is_empty()) return;
  const int64_t tasks = p.batch * p.heads_k;
  const int threads = num_threads > 0 ? num_threads : cpu::available_threads();
  std::atomic<int64_t> next{0};
  cpu::run_workers(static_cast<int>(std::clamp<int64_t>(tasks, 1, threads)), [&](int) {
    auto head = make_head();
    for (int64_t task; (task = next.fetch_add(1)) < tasks;)
      head(task / p.heads_k, task % p.heads_k);
  });
}

// Rows of tensors as the oracles have them: in float64 and, for sums of magnitudes, which need no
// more, as absolute values in float32.

// Row `row` of a head as doubles, times a scale.
inline void load_row(const TensorView& t, flash3_dtype dtype, int64_t batch, int64_t row,
                     int64_t head, double scale, double* to) {
  const int64_t first = batch * t.stride_batch + row * t.stride_seq + head * t.stride_head;
  const auto load = [&](flash3_dtype known) {
    for (int64_t d = 0; d < t.dim; ++d) to[d] = scale * load_float(t.data, known, first + d);
  };
  switch (dtype) {  // here, not for every element
    case FLASH3_FLOAT16: return load(FLASH3_FLOAT16);
    case FLASH3_BFLOAT16: return load(FLASH3_BFLOAT16);
    case FLASH3_FLOAT8_E4M3: return load(FLASH3_FLOAT8_E4M3);
    default: return load(FLASH3_FLOAT32);
  }
}

inline void magnitudes(const double* row, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<float>(std::abs(row[d]));
}

// The Euclidean norm; 0 if the row is not finite, as its scores have no error then.
inline double norm(const double* row, int64_t dim) {
  double squares = 0;
  for (int64_t d = 0; d < dim; ++d) squares += row[d] * row[d];
  return std::isfinite(squares) ? std::sqrt(squares) : 0;
}

// K or V of one head, as the products of the oracles need it.
struct ReferenceKeys {
  ReferenceTable<double> rows;    // [key, dim]
  ReferenceTable<double> panels;  // [key / lanes · dim + d, key % lanes]
  ReferenceTable<float> sizes;    // |rows|
  std::vector<double> norms;
  bool finite = true;
  static constexpr int kLanes = kReferenceLanes<double>;

  // more: what each row goes on with.
  void load(const TensorView& t, flash3_dtype dtype, int64_t batch, int64_t head,
            const ScaleView* scale = nullptr, const TensorView* more = nullptr) {
    const int64_t dim = t.dim + (more ? more->dim : 0);
    rows.resize(t.seq, dim);
    panels.resize(ceil_div(t.seq, kLanes) * dim, kLanes);
    sizes.resize(t.seq, dim);
    norms.assign(static_cast<size_t>(t.seq), 0);
    finite = true;
    for (int64_t j = 0; j < t.seq; ++j) {
      load_row(t, dtype, batch, j, head, scale ? scale->at_row(batch, head, j) : 1, rows[j]);
      if (more) load_row(*more, dtype, batch, j, head, 1, rows[j] + t.dim);
      magnitudes(rows[j], dim, sizes[j]);
      norms[static_cast<size_t>(j)] = norm(rows[j], dim);
      for (int64_t d = 0; d < dim; ++d) {
        panels[j / kLanes * dim + d][j % kLanes] = rows[j][d];
        finite = finite && std::isfinite(rows[j][d]);
      }
    }
  }
  // The largest norm of the keys that a row sees.
  double largest_norm(IndexRange keys) const {
    double largest = 0;
    for (int64_t j = keys.begin; j < keys.end; ++j)
      largest = std::max(largest, norms[static_cast<size_t>(j)]);
    return largest;
  }
};

}  // namespace flash3
