// SPDX-License-Identifier: Apache-2.0
// flash3_quantize on the CPU: many threads, a block of tokens of one head at a time.
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace flash3::cpu {

struct QuantizePlan {
  int64_t blocks = 0;            // of q, k and v; ragged: at most
  bool has_wide_scales = false;  // a scale is of more than a block: all of it is read for it first
  int threads = 1;
};

QuantizePlan plan_quantize(const QuantizeProblem& problem);

// INVALID_ARGUMENT, and nothing written, if cu_seqlens or seqused hold what they must not.
Status run_quantize(const QuantizeProblem& problem);

}  // namespace flash3::cpu
