// SPDX-License-Identifier: Apache-2.0
// The gradient of a bias of each pair, beside the kernels that sum it: zeros where none of them
// writes, and the sum of parts, always in one order.
#include "cuda/sm90/backward/bias_gradient_kernels.hpp"
#include "cuda/sm90/backward/store_gradient.cuh"

namespace flash3::cuda::sm90 {
namespace {

constexpr int kThreads = 128;

// Block (128 keys, row).
__global__ void __launch_bounds__(kThreads) clear_pairs_kernel(PairGradient to) {
  const int key = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (key >= to.keys) return;
  for (int i = 0; i < to.heads * to.batch; ++i) {
    const int batch = i / to.heads, head = i % to.heads;
    const long long at = batch * to.stride_batch + head * to.stride_head +
                         blockIdx.y * to.stride_row + key * to.stride_key;
    if (to.type == FloatType::kFloat32)
      static_cast<float*>(to.data)[at] = 0.f;
    else
      static_cast<uint16_t*>(to.data)[at] = 0;
  }
}

// A thread an element, in the order of the parts.
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(PairParts parts, PairGradient to) {
  const long long count = (long long)(to.heads) * to.rows * to.keys;
  for (long long i = (long long)(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += (long long)(gridDim.x) * kThreads) {
    float sum = 0.f;
    for (int part = 0; part < parts.parts; ++part) sum += parts.data[part * count + i];
    const int key = int(i % to.keys), row = int(i / to.keys % to.rows),
              head = int(i / to.keys / to.rows);
    store_gradient(to, head * to.stride_head + row * to.stride_row + key * to.stride_key, sum);
  }
}

}  // namespace

cudaError_t launch_sum_parts(const PairParts& parts, const PairGradient& to, cudaStream_t stream) {
  constexpr long long kMostBlocks = 4096;
  const long long blocks = ceil_div((long long)(to.heads) * to.rows * to.keys, kThreads);
  sum_parts_kernel<<<unsigned(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, stream>>>(
      parts, to);
  return cudaPeekAtLastError();
}

cudaError_t launch_clear_pairs(const PairGradient& pairs, cudaStream_t stream) {
  constexpr int kMostRows = 65535;  // of a grid
  PairGradient part = pairs;
  for (int row = 0; row < pairs.rows && pairs.keys > 0; row += kMostRows) {
    part.rows = pairs.rows - row < kMostRows ? pairs.rows - row : kMostRows;
    const long long bytes = pairs.type == FloatType::kFloat32 ? 4 : 2;
    part.data = static_cast<char*>(pairs.data) + row * pairs.stride_row * bytes;
    clear_pairs_kernel<<<dim3(unsigned(ceil_div(pairs.keys, kThreads)), unsigned(part.rows)),
                         kThreads, 0, stream>>>(part);
  }
  return cudaPeekAtLastError();
}

}  // namespace flash3::cuda::sm90
