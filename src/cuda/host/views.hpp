// SPDX-License-Identifier: Apache-2.0
// A call's tensors as the kernels take them.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/host/element_type.hpp"

namespace flash3::cuda {

inline SinkRow sink_row(const SinkView& view) { return {view.data, float_type(view.dtype)}; }

inline RowOutput row_output(const LseView& view) {
  return {view.data, view.stride_batch, view.stride_head};
}
inline RowOutputs row_outputs(const ForwardProblem& problem) {
  return {row_output(problem.lse), row_output(problem.max_logits)};
}

// Whether all rows begin at multiples of so many bytes and are whole pieces of them.
inline bool in_pieces(const TensorView& t, int element_bytes = 2, int piece_bytes = 16) {
  return reinterpret_cast<uintptr_t>(t.data) % piece_bytes == 0 &&
         (t.stride_batch | t.stride_seq | t.stride_head | t.dim) % (piece_bytes / element_bytes) ==
             0;
}

}  // namespace flash3::cuda
