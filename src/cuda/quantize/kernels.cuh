// SPDX-License-Identifier: Apache-2.0
// The kernels of one element type, by head dim and by what they do.
#pragma once

#include "cuda/quantize/rotating_kernel.cuh"

namespace flash3::cuda {

template <Element kElement>
const void* quantize_kernel_of(int columns, bool transforms) {
  const auto pick = [transforms](auto* transforming, auto* plain) {
    return reinterpret_cast<const void*>(transforms ? transforming : plain);
  };
  switch (columns) {
    case 64: return pick(quantize_kernel<kElement, 64, true>, quantize_kernel<kElement, 64, false>);
    case 128:
      return pick(quantize_kernel<kElement, 128, true>, quantize_kernel<kElement, 128, false>);
    default:
      return pick(quantize_kernel<kElement, 256, true>, quantize_kernel<kElement, 256, false>);
  }
}

template <Element kElement>
const void* quantize_rotating_kernel_of(int dim) {
  const auto address = [](auto* kernel) { return reinterpret_cast<const void*>(kernel); };
  switch (dim) {
    case 64: return address(quantize_rotating_kernel<kElement, 64>);
    case 96: return address(quantize_rotating_kernel<kElement, 96>);
    case 128: return address(quantize_rotating_kernel<kElement, 128>);
    case 192: return address(quantize_rotating_kernel<kElement, 192>);
    case 256: return address(quantize_rotating_kernel<kElement, 256>);
    default: return nullptr;
  }
}

}  // namespace flash3::cuda
