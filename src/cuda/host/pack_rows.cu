// SPDX-License-Identifier: Apache-2.0
#include "core/arithmetic.hpp"
#include "cuda/host/pack_rows.hpp"

namespace flash3::cuda {
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

}  // namespace

cudaError_t launch_pack_rows(const TensorView& source, const TensorView& packed, int element_bytes,
                             cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 132 * 16;  // grid-stride beyond
  const int64_t count = source.batch * source.seq * source.heads * source.dim;
  const int64_t needed = ceil_div(count, kThreads);
  const int64_t blocks = needed < kMaxBlocks ? needed : kMaxBlocks;
  const auto kernel = element_bytes == 1 ? pack_kernel<uint8_t> : pack_kernel<uint16_t>;
  kernel<<<unsigned(blocks), kThreads, 0, stream>>>(source, packed);
  return cudaPeekAtLastError();
}

}  // namespace flash3::cuda
