// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/bias_gradient/instances.cuh"

namespace flash3::cuda::sm90 {

template BiasGradientKernel bias_gradient_kernel_of<64>(Element element, bool by_distance);

}  // namespace flash3::cuda::sm90
