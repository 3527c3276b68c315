// SPDX-License-Identifier: Apache-2.0
// From the sums of dS on diagonals to the gradients of a table by distance and of slopes, each
// always summed in one order.
#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/sm90/backward/bias_gradient_kernels.hpp"

namespace flash3::cuda::sm90 {
namespace {

constexpr int kThreads = 128;

__device__ float block_sum(float x) {
  __shared__ float sums[kThreads];
  sums[threadIdx.x] = x;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < unsigned(step)) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  return sums[0];
}

__device__ ListedSequence sequence_of(const DistanceGradients& params, int i) {
  return params.sequences.rows != nullptr ? params.sequences.rows[i] : params.one_length;
}

// The sum of dS of a head of a sequence, or of all, over the pairs with this j − i.
__device__ float sum_at(const DistanceGradients& params, int sequence, int head, int x) {
  constexpr int kTileN = 64;
  const DiagonalSums& sums = params.sums;
  const int last_query = params.keys_per_query_tile * kTileN - 1;
  const float* const windows = sums.data + (int64_t(sequence) * params.heads_q + head) *
                                               sums.diagonals * DiagonalSums::kWindow;
  // Windows that hold it: of the diagonals from which it is at most a tile's keys further, or a
  // tile's queries before. The sum is that of their parts.
  const int shifted = x + last_query - sums.first * kTileN;  // not below 0
  float sum = 0.f;
  for (int i = shifted / kTileN; i >= 0; --i) {
    const int place = shifted - i * kTileN;
    if (place >= last_query + kTileN) break;
    if (i < sums.diagonals) sum += windows[int64_t(i) * DiagonalSums::kWindow + place];
  }
  return sum;
}

// Block (entry, head).
__global__ void __launch_bounds__(kThreads) table_gradient_kernel(DistanceGradients params) {
  const int distance = int(blockIdx.x) - params.reach, out_head = blockIdx.y;
  const bool all_heads = params.table_heads == 1;
  const int first_head = all_heads ? 0 : out_head, heads = all_heads ? params.heads_q : 1;
  float sum = 0.f;
  for (int i = 0; i < params.sums.sequences; ++i) {
    const ListedSequence s = sequence_of(params, i);
    const int shift = params.rule.shift(s.q_length, s.k_length), least = 1 - s.q_length,
              most = s.k_length - 1;
    const int begin = distance == -params.reach ? least : max(least, distance + shift),
              end = distance == params.reach ? most : min(most, distance + shift);
    for (int h = first_head; h < first_head + heads; ++h)
      for (int x = begin + int(threadIdx.x); x <= end; x += kThreads)
        sum += sum_at(params, i, h, x);
  }
  const float total = block_sum(sum);
  if (threadIdx.x == 0) params.table[out_head * params.table_head + blockIdx.x] = total;
}

// Block (head, batch element of the slopes).
__global__ void __launch_bounds__(kThreads) slopes_gradient_kernel(DistanceGradients params) {
  const int head = blockIdx.x;
  float sum = 0.f;
  for (int i = 0; i < params.sums.sequences; ++i) {
    ListedSequence s = sequence_of(params, i);
    if (params.sequences.rows == nullptr) s.batch = i;
    if (params.slopes_batches > 1 && s.batch != int(blockIdx.y)) continue;
    const int shift = params.rule.shift(s.q_length, s.k_length);
    for (int x = 1 - s.q_length + int(threadIdx.x); x < s.k_length; x += kThreads)
      sum -= float(abs(x - shift)) * sum_at(params, i, head, x);
  }
  const float total = block_sum(sum);
  if (threadIdx.x == 0)
    params.slopes[blockIdx.y * params.slopes_batch + head * params.slopes_head] = total;
}

}  // namespace

cudaError_t launch_distance_gradients(const DistanceGradients& params, cudaStream_t stream) {
  if (params.table != nullptr && params.table_heads > 0)
    table_gradient_kernel<<<dim3(unsigned(2 * params.reach + 1), unsigned(params.table_heads)),
                            kThreads, 0, stream>>>(params);
  if (params.slopes != nullptr && params.heads_q > 0 && params.slopes_batches > 0)
    slopes_gradient_kernel<<<dim3(unsigned(params.heads_q), unsigned(params.slopes_batches)),
                             kThreads, 0, stream>>>(params);
  return cudaPeekAtLastError();
}

}  // namespace flash3::cuda::sm90
