// SPDX-License-Identifier: Apache-2.0
// Inputs whose rows TMA cannot address are first copied to aligned rows in the workspace. Costs one
// read and one write of the tensor; only head dims or strides that are not multiples of 16
// bytes, or bases off 16 bytes, need it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {

struct PackedCopy {
  bool needed = false;
  size_t offset = 0;  // into the workspace
  int64_t row = 0;    // elements from one row to the next
  int element_bytes = 2;
};

// Whether the input (tensor_rows()) needs a copy; if so *workspace grows by it.
PackedCopy plan_copy(const TensorView& view, RowIndexing rows, size_t* workspace,
                     int element_bytes = 2);

// The tensor that the kernel loads: the caller's own, or the copy.
TensorView input_view(const Problem& problem, const TensorView& source, const PackedCopy& copy);
// The copy, if one is needed.
void prepare_copy(const Problem& problem, const TensorView& source, const PackedCopy& copy,
                  Launches* launches);

}  // namespace flash3::cuda::sm90
