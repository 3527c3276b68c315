// SPDX-License-Identifier: Apache-2.0
#include "cuda/quantize/kernel.cuh"

namespace flash3::cuda {

template const void* quantize_kernel_of<Element::kFloat16>(int columns, bool transforms);
template const void* quantize_rotating_kernel_of<Element::kFloat16>(int dim);

}  // namespace flash3::cuda
