#include <cstdint>

#include "hopper/forward/pack.hpp"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_kernel(TensorView source, TensorView packed) {
  const auto* from = static_cast<const uint16_t*>(source.data);
  auto* to = static_cast<uint16_t*>(packed.data);
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

TensorView packed_view(const TensorView& source, void* data, int64_t row) {
  TensorView packed = source;
  packed.data = data;
  packed.stride_head = row;
  packed.stride_seq = row * source.heads;
  packed.stride_batch = packed.stride_seq * source.seq;
  return packed;
}

cudaError_t launch_pack(const TensorView& source, const TensorView& packed, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 132 * 16;  // grid-stride beyond
  const int64_t count = source.batch * source.seq * source.heads * source.dim;
  const int64_t needed = (count + kThreads - 1) / kThreads;
  const int64_t blocks = needed < kMaxBlocks ? needed : kMaxBlocks;
  pack_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(source, packed);
  return cudaPeekAtLastError();
}

}  // namespace flash3::hopper
