// SPDX-License-Identifier: Apache-2.0
// Adds one part of a gradient to others, for 10_ring.cpp.
#include <cstdint>

namespace {

__global__ void add_kernel(float* sum, const float* part, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) sum[i] += part[i];
}

}  // namespace

cudaError_t add(float* sum, const float* part, int64_t count, cudaStream_t stream) {
  constexpr int kThreads = 256;
  add_kernel<<<unsigned((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(sum, part,
                                                                                   count);
  return cudaGetLastError();
}
