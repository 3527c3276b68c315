// SPDX-License-Identifier: Apache-2.0
// The kernels' addresses: one explicit instance a generated file (cmake/kernel_instances.cmake), so
// that files compile in parallel and in seconds.
#pragma once

#include "cuda/device/kinds.hpp"

namespace flash3::cuda::sm90 {

template <Element kElement, int kHeadDim, int kHeadDimV, int kRows, bool kCapped>
const void* decode_kernel_function();

template <Element kElement>
const void* latent_kernel_function();

}  // namespace flash3::cuda::sm90
