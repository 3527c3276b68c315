// SPDX-License-Identifier: Apache-2.0
// What the merge kernel is launched with.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda {

inline constexpr int kMergeThreads = 128;
inline constexpr int kMergeColumns = 4;  // of a row, that a thread has at once

struct MergeParams {
  const float* parts;
  long long part_stride, part_stride_row, part_stride_head;
  const float* lse_parts;
  long long lse_part_stride, lse_part_stride_head;
  void* out;
  long long out_stride_row, out_stride_head;
  FloatType type;
  float* lse;  // or null
  long long lse_stride_head;
  SinkRow sink;
  long long rows;
  int heads, count, dim;              // count: of the parts
  bool parts_in_quads, out_in_quads;  // rows of aligned groups of four
};

const void* merge_function();

}  // namespace flash3::cuda
