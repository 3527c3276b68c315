// SPDX-License-Identifier: Apache-2.0
// Which of the tensors that a case has no member for (AddedOptions) a case may have.
#pragma once

#include "cases/case.hpp"

namespace flash3::cases {

// Whether a case may have this tensor beside what it has already. An input needs finite scores: a
// weight of 0 times an infinity is NaN, and which weights are 0 depends on the precision.
bool goes_with(const Case& c, const ParamField& tensor);

// Whether kernels of the backend take the tensors that the case has.
inline bool takes_added_tensors(flash3_backend backend, const Case& c) {
  bool takes = c.dropout == 0 || backend == FLASH3_BACKEND_CPU;
  AddedOptions::visit(c.added, [&](const ParamField& field, int64_t value) {
    if (value != 0 && field.is_cpu_alone && backend != FLASH3_BACKEND_CPU) takes = false;
  });
  return takes;
}

}  // namespace flash3::cases
