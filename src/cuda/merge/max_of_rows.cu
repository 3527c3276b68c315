// SPDX-License-Identifier: Apache-2.0
// The largest of many rows of a head. A block has a head: few kilobytes, from the L2 cache, where
// the kernel before has left them.
#include "cuda/host/cuda_status.hpp"
#include "cuda/merge/merge.hpp"

namespace flash3::cuda {
namespace {

constexpr int kThreads = 1024, kAtOnce = 8;

__global__ void __launch_bounds__(kThreads)
    max_of_rows_kernel(const float* rows, long long row_stride, long long count, float* out,
                       long long out_stride) {
  const float* const own = rows + blockIdx.x * row_stride;
  const float nothing = __int_as_float(0xff800000);  // −∞
  float largest = nothing;
  for (long long first = threadIdx.x; first < count; first += kThreads * kAtOnce) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const long long row = first + i * kThreads;
      x[i] = row < count ? __ldcg(own + row) : nothing;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, x[i]);
  }
  __shared__ float of_warp[kThreads / 32];
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  largest = of_warp[threadIdx.x];
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x == 0) out[blockIdx.x * out_stride] = largest;
}

}  // namespace

Status launch_max_of_rows(const LseView& rows, int64_t count, int64_t heads, const LseView& out,
                          void* stream) {
  if (heads == 0) return {};
  max_of_rows_kernel<<<unsigned(heads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      rows.data, rows.stride_head, count, out.data, out.stride_head);
  return cuda_status(cudaGetLastError(), "launching the kernel for the largest logits of heads");
}

}  // namespace flash3::cuda
