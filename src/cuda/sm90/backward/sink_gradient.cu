// SPDX-License-Identifier: Apache-2.0
// Computes the gradient of the sinks from what preprocessing wrote. A sink has no value vector, so
// that dS = P ∘ (dP − delta) is −P · delta.
#include "core/arithmetic.hpp"
#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/score/row_end.cuh"
#include "cuda/sm90/backward/auxiliary_kernels.hpp"

namespace flash3::cuda::sm90 {
namespace {

constexpr int kThreads = 512;

// A block has a query head.
__global__ void __launch_bounds__(kThreads) sink_gradient_kernel(SinkGradientParams params) {
  const BackwardWorkspace& workspace = params.workspace;
  const int head = blockIdx.x, thread = threadIdx.x;
  const float sink_log2 = load_sink(params.sink, head) * float(kLog2E);
  float sum = 0.f;
  const int64_t rows_of_a_head = int64_t(workspace.tiles.tiles) * workspace.tiles.tile_m;
  const int64_t all_rows = int64_t(workspace.all_tiles()) * workspace.tiles.tile_m;
  for (int64_t first_row = head * rows_of_a_head; first_row < all_rows;
       first_row += workspace.tiles.heads_q * rows_of_a_head) {
    // Rows without a token have an LSE of +∞.
    for (int64_t row = thread; row < rows_of_a_head; row += kThreads)
      sum -=
          exp2f(sink_log2 - workspace.lse_log2[first_row + row]) * workspace.delta[first_row + row];
  }
  __shared__ float sums[kThreads];
  sums[thread] = sum;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (thread < step) sums[thread] += sums[thread + step];
  }
  if (thread != 0) return;
  void* const dsink = const_cast<void*>(params.dsink.data);
  if (params.dsink.type == FloatType::kFloat32) {
    static_cast<float*>(dsink)[head] = sums[0];
  } else {
    static_cast<uint16_t*>(dsink)[head] = uint16_t(params.dsink.type == FloatType::kFloat16
                                                       ? pack2<Element::kFloat16>(sums[0], 0.f)
                                                       : pack2<Element::kBFloat16>(sums[0], 0.f));
  }
}

}  // namespace

cudaError_t launch_sink_gradient(const SinkGradientParams& params, cudaStream_t stream) {
  sink_gradient_kernel<<<dim3(unsigned(params.workspace.tiles.heads_q)), kThreads, 0, stream>>>(
      params);
  return cudaPeekAtLastError();
}

}  // namespace flash3::cuda::sm90
