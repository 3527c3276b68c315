// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/host/packed_copy.hpp"

#include "core/arithmetic.hpp"
#include "cuda/host/cuda_status.hpp"
#include "cuda/host/pack_rows.hpp"

namespace flash3::cuda::sm90 {
namespace {

// The packed tensor at `data`: [batch, seq, heads, dim] with `row` elements from one row to the
// next.
TensorView packed_view(const TensorView& source, void* data, int64_t row) {
  TensorView packed = source;
  packed.data = data;
  packed.stride_head = row;
  packed.stride_seq = row * source.heads;
  packed.stride_batch = packed.stride_seq * source.seq;
  return packed;
}

}  // namespace

PackedCopy plan_copy(const TensorView& view, RowIndexing rows, size_t* workspace,
                     int element_bytes) {
  PackedCopy copy;
  const int64_t elements = view.batch * view.seq * view.heads;
  if (elements == 0 || tma_can_address(view, rows, element_bytes)) return copy;
  copy.needed = true;
  copy.element_bytes = element_bytes;
  copy.row = round_up(view.dim, int64_t{16} / element_bytes);
  copy.offset = reserve_workspace(size_t(elements * copy.row * element_bytes), workspace);
  return copy;
}

TensorView input_view(const Problem& problem, const TensorView& source, const PackedCopy& copy) {
  if (!copy.needed) return source;
  return packed_view(source, static_cast<char*>(problem.workspace) + copy.offset, copy.row);
}

void prepare_copy(const Problem& problem, const TensorView& source, const PackedCopy& copy,
                  Launches* launches) {
  if (!copy.needed) return;
  launches->add(runtime_launch<launch_pack_rows>(
      "launching the copy", source, input_view(problem, source, copy), copy.element_bytes));
}

}  // namespace flash3::cuda::sm90
