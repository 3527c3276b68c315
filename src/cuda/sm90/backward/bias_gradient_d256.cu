// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backward/bias_gradient_instances.cuh"

namespace flash3::cuda::sm90 {

template BiasGradientKernel bias_gradient_kernel_of<256>(Element element, bool by_distance);

}  // namespace flash3::cuda::sm90
