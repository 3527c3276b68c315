// SPDX-License-Identifier: Apache-2.0
// The three matrix products of the oracles: plain loops, compiled once for each width of vectors.
// Tables hold their rows in whole cache lines, padded with zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/arithmetic.hpp"
#include "oracle/visible.hpp"

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

}  // namespace flash3
