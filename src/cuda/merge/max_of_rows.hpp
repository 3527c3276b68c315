// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace flash3::cuda {

// The kernel after those of a call with max_logits of heads: Backend::max_of_rows().
Status launch_max_of_rows(const LseView& rows, int64_t count, int64_t heads, const LseView& out,
                          void* stream);

}  // namespace flash3::cuda
