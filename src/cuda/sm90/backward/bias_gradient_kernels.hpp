// SPDX-License-Identifier: Apache-2.0
// The kernels of the gradients of biases.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/backward/bias_gradient_params.h"

namespace flash3::cuda::sm90 {

// One of bias_gradient_kernel_of_block<>, for cudaLaunchKernel.
struct BiasGradientKernel {
  const void* function;
  int threads, shared_bytes;
  int tile_m, tile_n;
};
// Of head dims up to kDim: 64, 128 or 256. by_distance: it sums diagonals.
template <int kDim>
BiasGradientKernel bias_gradient_kernel_of(Element element, bool by_distance);

// Zeroes it: what sequences leave out, or a mask, nobody else writes.
cudaError_t launch_clear_pairs(const PairGradient& pairs, cudaStream_t stream);
// Sums up the parts.
cudaError_t launch_sum_parts(const PairParts& parts, const PairGradient& to, cudaStream_t stream);

cudaError_t launch_distance_gradients(const DistanceGradients& params, cudaStream_t stream);

}  // namespace flash3::cuda::sm90
