// SPDX-License-Identifier: Apache-2.0
// The kernels as the host sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "hopper/device/element.hpp"
#include "hopper/quantize/params.h"

namespace flash3::hopper {

// The kernel for head dims up to `columns` (64, 128 or 256), which as many threads as columns run;
// turns: for rotary and rotation.
template <Element kElement>
const void* quantize_kernel_of(int columns, bool turns);

// For the rotation alone, of tensors that all have this head dim and are accessed 16 bytes at a
// time; null if there is none for it. As many threads as quantize_kernel_of's.
template <Element kElement>
const void* quantize_rotating_kernel_of(int dim);

cudaError_t launch_wide_scales(const WideScalesParams& params, cudaStream_t stream);

}  // namespace flash3::hopper
