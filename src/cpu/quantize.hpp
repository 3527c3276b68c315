// SPDX-License-Identifier: Apache-2.0
// flash3_quantize on the CPU: many threads, a block of tokens of one head at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"

namespace flash3::cpu {

// How one call runs. Made by plan_quantize alone.
struct QuantizePlan {
  int64_t blocks = 0;            // of q, k and v; ragged: at most
  bool has_wide_scales = false;  // a scale is of more than a block: all of it is read for it first
  int threads = 1;
  size_t workspace_size =
      0;  // scales of more than a block are found in the scale tensors themselves
};

QuantizePlan plan_quantize(const QuantizeProblem& problem);

// INVALID_ARGUMENT, and nothing written, if cu_seqlens or seqused hold what they must not.
Status run_quantize(const QuantizeProblem& problem, const QuantizePlan& plan);

}  // namespace flash3::cpu
