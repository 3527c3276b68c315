// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/arithmetic.hpp"
#include "device/compare.hpp"

namespace flash3::device {
namespace {

constexpr int kThreads = 256, kMostBlocks = 1024;

__global__ void __launch_bounds__(kThreads)
    compare(const unsigned char* a, const unsigned char* b, size_t bytes, int* differ) {
  const size_t step = size_t{gridDim.x} * kThreads;
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < bytes; i += step)
    if (a[i] != b[i]) *differ = 1;
}

}  // namespace

cudaError_t note_difference(const void* a, const void* b, size_t bytes, int* differ,
                            cudaStream_t stream) {
  const size_t blocks = std::min<size_t>(ceil_div(bytes, kThreads), kMostBlocks);
  compare<<<unsigned(blocks), kThreads, 0, stream>>>(
      static_cast<const unsigned char*>(a), static_cast<const unsigned char*>(b), bytes, differ);
  return cudaGetLastError();
}

}  // namespace flash3::device
