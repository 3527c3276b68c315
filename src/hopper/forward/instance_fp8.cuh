// SPDX-License-Identifier: Apache-2.0
// What a generated file of an FP8 kernel includes (cmake/kernel_instances.cmake): the kernel of one
// row, put together from its policies.
#pragma once

#include "hopper/forward/kernel.cuh"
#include "hopper/forward/load_fp8.cuh"
#include "hopper/forward/operands_fp8.cuh"
#include "hopper/forward/store_fp8.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT)                                                        \
  namespace flash3::hopper {                                                                   \
  FLASH3_FORWARD_ROW(ELEMENT)                                                                  \
  template <>                                                                                  \
  const void* forward_kernel_function<FLASH3_KERNEL_OF(ELEMENT, kRow)>() {                     \
    using Traits = Fp8Traits<ForwardRow<FLASH3_KERNEL_OF(ELEMENT, kRow)>>;                     \
    using Roles = Consumer<Traits, OperandsFp8<Traits>, StoreFp8<Traits>>;                     \
    return reinterpret_cast<const void*>(&forward_kernel<Traits, Fp8Producer<Traits>, Roles>); \
  }                                                                                            \
  }
