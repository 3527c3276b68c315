// SPDX-License-Identifier: Apache-2.0
// Scales of more than a block of tokens. The scale tensor itself holds the largest sizes while the
// kernels seek them, so that a call needs no workspace.
#include "core/arithmetic.hpp"
#include "cuda/quantize/plan.hpp"

namespace flash3::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    wide_scales_kernel(const __grid_constant__ WideScalesParams params) {
  const WideScales& scales = params.tensors[blockIdx.y];
  for (Index i = Index(blockIdx.x) * kThreads + threadIdx.x; i < scales.count;
       i += Index(gridDim.x) * kThreads) {
    const Index batch = i / scales.heads, head = i - batch * scales.heads;
    float* const at =
        scales.view.data + batch * scales.view.stride_batch + head * scales.view.stride_head;
    *at = params.before ? 0.f : scale_of_amax(*at);
  }
}

}  // namespace

cudaError_t launch_wide_scales(const WideScalesParams& params, cudaStream_t stream) {
  constexpr Index kMaxBlocks = 132;  // grid-stride beyond
  Index most = 0;
  for (const WideScales& scales : params.tensors) most = scales.count > most ? scales.count : most;
  const Index needed = ceil_div(most, kThreads);
  wide_scales_kernel<<<dim3(unsigned(needed < kMaxBlocks ? needed : kMaxBlocks), 3), kThreads, 0,
                       stream>>>(params);
  return cudaPeekAtLastError();
}

}  // namespace flash3::cuda
