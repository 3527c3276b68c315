// SPDX-License-Identifier: Apache-2.0
// What the files of kernels, one for each width, instantiate.
#pragma once

#include "cuda/sm90/backward/bias_gradient.cuh"
#include "cuda/sm90/backward/bias_gradient_kernels.hpp"

namespace flash3::cuda::sm90 {

template <int kDim, Element kElement, bool kByDistance>
BiasGradientKernel describe_kernel() {
  using Traits = BiasGradientTraits<kDim, kElement>;
  static_assert(sizeof(typename Traits::Shared) <= kMostSharedBytes);
  return {
      reinterpret_cast<const void*>(&bias_gradient_kernel_of_block<kDim, kElement, kByDistance>),
      Traits::kThreads, int(sizeof(typename Traits::Shared)), Traits::kTileM, Traits::kTileN};
}

template <int kDim>
BiasGradientKernel bias_gradient_kernel_of(Element element, bool by_distance) {
  if (element == Element::kFloat16)
    return by_distance ? describe_kernel<kDim, Element::kFloat16, true>()
                       : describe_kernel<kDim, Element::kFloat16, false>();
  return by_distance ? describe_kernel<kDim, Element::kBFloat16, true>()
                     : describe_kernel<kDim, Element::kBFloat16, false>();
}

}  // namespace flash3::cuda::sm90
