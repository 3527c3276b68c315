// SPDX-License-Identifier: Apache-2.0
// Rows of tensors as the oracles have them: in float64 and, for sums of magnitudes, which need no
// more, as absolute values in float32.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/problem.hpp"
#include "oracle/reference_loops.hpp"

namespace flash3 {

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
