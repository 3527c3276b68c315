// SPDX-License-Identifier: Apache-2.0
// A function is compiled for an instruction set by its target attribute, and what it calls is
// inlined into it: no -m flag, which would leak into inline functions of the standard library.
#include "oracle/reference_rows.hpp"

namespace flash3 {
namespace {

#define FLASH3_INLINE inline __attribute__((always_inline))

template <class Real>
struct Lanes {
  typedef Real Vector __attribute__((vector_size(64)));
};
template <class Real>
using Vector = typename Lanes<Real>::Vector;

template <class Real>
FLASH3_INLINE Vector<Real>* line(Real* x) {
  return reinterpret_cast<Vector<Real>*>(x);
}
template <class Real>
FLASH3_INLINE const Vector<Real>* line(const Real* x) {
  return reinterpret_cast<const Vector<Real>*>(x);
}

// kRows: rows whose sums are in registers at a time.
template <int kRows, class Real>
FLASH3_INLINE void dot_products(const ReferenceTable<Real>& x, const ReferenceTable<Real>& panels,
                                int64_t dim, IndexRange keys, ReferenceTable<Real>* products) {
  constexpr int kLanes = kReferenceLanes<Real>;
  const int64_t x_stride = x.stride();
  for (int64_t j = keys.begin / kLanes * kLanes; j < keys.end; j += kLanes)
    for (int first = 0; first < kReferenceRows; first += kRows) {
      const Real *from = x[first], *column = panels[j / kLanes * dim];
      Vector<Real> sum[kRows] = {};
      for (int64_t d = 0; d < dim; ++d, column += kLanes)
        for (int r = 0; r < kRows; ++r) sum[r] += from[r * x_stride + d] * *line(column);
      for (int r = 0; r < kRows; ++r) *line((*products)[first + r] + j) = sum[r];
    }
}

template <int kRows, class Real>
FLASH3_INLINE void add_weighted(int first, const ReferenceTable<Real>& weights,
                                const ReferenceTable<Real>& table, IndexRange keys,
                                ReferenceTable<Real>* sums) {
  const int64_t stride = table.stride(), weight_stride = weights.stride();
  const Real* weight = weights[first];
  for (int64_t d = 0; d < stride; d += kReferenceLanes<Real>) {
    const Real* row = table[keys.begin] + d;
    Vector<Real> sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = *line((*sums)[first + r] + d);
    for (int64_t j = keys.begin; j < keys.end; ++j, row += stride)
      for (int r = 0; r < kRows; ++r) sum[r] += weight[r * weight_stride + j] * *line(row);
    for (int r = 0; r < kRows; ++r) *line((*sums)[first + r] + d) = sum[r];
  }
}

template <int kRows, class Real>
FLASH3_INLINE void add_transposed(int first, const ReferenceTable<Real>& weights,
                                  const ReferenceTable<Real>& x, IndexRange keys,
                                  ReferenceTable<Real>* sums) {
  const int64_t stride = x.stride(), weight_stride = weights.stride();
  const Real* weight = weights[first];
  for (int64_t d = 0; d < stride; d += kReferenceLanes<Real>) {
    Vector<Real> row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = *line(x[first + r] + d);
    Real* to = (*sums)[keys.begin] + d;
    for (int64_t j = keys.begin; j < keys.end; ++j, to += stride) {
      Vector<Real> sum = *line(to);
      for (int r = 0; r < kRows; ++r) sum += weight[r * weight_stride + j] * row[r];
      *line(to) = sum;
    }
  }
}

// Where a vector of 64 bytes takes two registers or four, half as many rows go together.
// NOLINTBEGIN(bugprone-macro-parentheses): an attribute and a type stand in none.
#define FLASH3_LOOPS(name, target, half)                                                      \
  template <class Real>                                                                       \
  struct name {                                                                               \
    static constexpr int kRows = kReferenceRows / (half);                                     \
    target static void dot(const ReferenceTable<Real>& x, const ReferenceTable<Real>& panels, \
                           int64_t dim, IndexRange keys, ReferenceTable<Real>* products) {    \
      dot_products<kRows>(x, panels, dim, keys, products);                                    \
    }                                                                                         \
    target static void weighted(int first, int rows, const ReferenceTable<Real>& weights,     \
                                const ReferenceTable<Real>& table, IndexRange keys,           \
                                ReferenceTable<Real>* sums) {                                 \
      if (keys.empty()) return;                                                               \
      if (rows == 1) return add_weighted<1>(first, weights, table, keys, sums);               \
      for (int r = 0; r < rows; r += kRows)                                                   \
        add_weighted<kRows>(first + r, weights, table, keys, sums);                           \
    }                                                                                         \
    target static void transposed(int first, int rows, const ReferenceTable<Real>& weights,   \
                                  const ReferenceTable<Real>& x, IndexRange keys,             \
                                  ReferenceTable<Real>* sums) {                               \
      if (keys.empty()) return;                                                               \
      if (rows == 1) return add_transposed<1>(first, weights, x, keys, sums);                 \
      for (int r = 0; r < rows; r += kRows)                                                   \
        add_transposed<kRows>(first + r, weights, x, keys, sums);                             \
    }                                                                                         \
    static constexpr ReferenceLoops<Real> kLoops{dot, weighted, transposed};                  \
  };

// NOLINTEND(bugprone-macro-parentheses)
FLASH3_LOOPS(Baseline, , 2)
#if defined(__x86_64__)
FLASH3_LOOPS(Avx2, __attribute__((target("avx2,fma"))), 2)
FLASH3_LOOPS(Avx512, __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma"))), 1)
#endif

}  // namespace

template <class Real>
const ReferenceLoops<Real>& reference_loops() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
    return Avx512<Real>::kLoops;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Avx2<Real>::kLoops;
#endif
  return Baseline<Real>::kLoops;
}

template const ReferenceLoops<float>& reference_loops<float>();
template const ReferenceLoops<double>& reference_loops<double>();

}  // namespace flash3
