// SPDX-License-Identifier: Apache-2.0
#include "core/arithmetic.hpp"
#include "hopper/host/cuda_status.hpp"
#include "hopper/host/packed_copy.hpp"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 256;

template <class Bits>
__global__ void __launch_bounds__(kThreads) pack_kernel(TensorView source, TensorView packed) {
  const auto* from = static_cast<const Bits*>(source.data);
  auto* to = static_cast<Bits*>(packed.data);
  const int64_t count = source.batch * source.seq * source.heads * source.dim;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += gridDim.x * int64_t(kThreads)) {
    const int64_t dim = i % source.dim, row = i / source.dim;
    const int64_t head = row % source.heads, seq = row / source.heads % source.seq,
                  batch = row / source.heads / source.seq;
    to[row * packed.stride_head + dim] =
        from[batch * source.stride_batch + seq * source.stride_seq + head * source.stride_head +
             dim];
  }
}

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

cudaError_t launch_pack(const TensorView& source, const TensorView& packed, int element_bytes,
                        cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 132 * 16;  // grid-stride beyond
  const int64_t count = source.batch * source.seq * source.heads * source.dim;
  const int64_t needed = ceil_div(count, kThreads);
  const int64_t blocks = needed < kMaxBlocks ? needed : kMaxBlocks;
  const auto kernel = element_bytes == 1 ? pack_kernel<uint8_t> : pack_kernel<uint16_t>;
  kernel<<<unsigned(blocks), kThreads, 0, stream>>>(source, packed);
  return cudaPeekAtLastError();
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

Status input_view(const Problem& problem, const TensorView& source, const PackedCopy& copy,
                  TensorView* view) {
  *view = source;
  if (!copy.needed) return {};
  *view = packed_view(source, static_cast<char*>(problem.workspace) + copy.offset, copy.row);
  return cuda_status(
      launch_pack(source, *view, copy.element_bytes, static_cast<cudaStream_t>(problem.stream)),
      "launching the copy");
}

}  // namespace flash3::hopper
