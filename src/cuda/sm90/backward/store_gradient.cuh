// SPDX-License-Identifier: Apache-2.0
// One element of the gradient of a bias of each pair.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/sm90/backward/bias_gradient_params.h"

namespace flash3::cuda::sm90 {

__device__ __forceinline__ void store_gradient(const PairGradient& to, long long at, float x) {
  if (to.type == FloatType::kFloat32)
    static_cast<float*>(to.data)[at] = x;
  else
    static_cast<uint16_t*>(to.data)[at] =
        uint16_t(to.type == FloatType::kFloat16 ? pack2<Element::kFloat16>(x, 0.f)
                                                : pack2<Element::kBFloat16>(x, 0.f));
}

}  // namespace flash3::cuda::sm90
