// SPDX-License-Identifier: Apache-2.0
// What the CPU does to whole rows, on many threads: flash3_merge, flash3_quantize, and rows of no
// token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/padding.hpp"
#include "core/problem.hpp"

namespace flash3::cpu {

// How one call runs. Made by plan_merge alone.
struct MergePlan {
  int threads = 1;
  size_t workspace_size = 0;
};

MergePlan plan_merge(const MergeProblem& problem);
Status run_merge(const MergeProblem& problem, const MergePlan& plan);

void fill_padding(const Padding& padding);

// flash3_quantize on the CPU: many threads, a block of tokens of one head at a time.

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
