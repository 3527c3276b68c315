// SPDX-License-Identifier: Apache-2.0
// The kernels as the host sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/device/types.hpp"
#include "cuda/quantize/params.h"

namespace flash3::cuda {

// The kernel for head dims up to `columns` (64, 128 or 256). A block has as many threads as
// columns. transforms: the kernel applies a rotary embedding, a rotation or both.
template <Element kElement>
const void* quantize_kernel_of(int columns, bool transforms);

// The kernel for a rotation alone, of tensors that all have this head dim and allow accesses of 16
// bytes; null if there is none. Its blocks have the threads of quantize_kernel_of's.
template <Element kElement>
const void* quantize_rotating_kernel_of(int dim);

cudaError_t launch_wide_scales(const WideScalesParams& params, cudaStream_t stream);

}  // namespace flash3::cuda
