// SPDX-License-Identifier: Apache-2.0
// The oracle's values as a right result: rounded to the tensor's dtype, and nothing else.
#pragma once

#include <vector>

#include "cases/tensors.hpp"
#include "core/convert.hpp"

namespace flash3::cases {

inline void fill_with(const std::vector<double>& values, GuardedTensor* to) {
  size_t next = 0;
  for_each_row(to->view, [&](int64_t row) {
    for (int64_t d = 0; d < to->view.shape[to->view.ndim - 1]; ++d)
      store_float(to->view.data, to->view.dtype, row + d, static_cast<float>(values[next++]));
  });
  to->fill_forbidden();
}

}  // namespace flash3::cases
