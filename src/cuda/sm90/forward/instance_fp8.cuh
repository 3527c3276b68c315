// SPDX-License-Identifier: Apache-2.0
// What a generated file of an FP8 kernel includes (cmake/kernel_instances.cmake): the kernel of one
// row, put together from its policies.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load_fp8.cuh"
#include "cuda/sm90/forward/operands_fp8.cuh"
#include "cuda/sm90/forward/store_fp8.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT)                                                        \
  namespace flash3::cuda::sm90 {                                                               \
  FLASH3_FORWARD_ROW(ELEMENT)                                                                  \
  template <>                                                                                  \
  const void* forward_kernel_function<FLASH3_KERNEL_OF(ELEMENT, kRow)>() {                     \
    using Traits = Fp8Traits<ForwardRow<FLASH3_KERNEL_OF(ELEMENT, kRow)>>;                     \
    using Roles = Consumer<Traits, OperandsFp8<Traits>, StoreFp8<Traits>>;                     \
    return reinterpret_cast<const void*>(&forward_kernel<Traits, Fp8Producer<Traits>, Roles>); \
  }                                                                                            \
  }
