// SPDX-License-Identifier: Apache-2.0
// What a generated file of a kernel of widened K and V includes (cmake/kernel_instances.cmake): the
// kernels of one row, put together from their policies.
#pragma once

#include "hopper/forward/kernel.cuh"
#include "hopper/forward/load_widened.cuh"
#include "hopper/forward/operands_widened.cuh"
#include "hopper/forward/store.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT)                                               \
  namespace flash3::hopper {                                                          \
  FLASH3_FORWARD_ROW(ELEMENT)                                                         \
  template <>                                                                         \
  const void* forward_kernel_function<FLASH3_KERNEL_OF(ELEMENT, kRow)>() {            \
    using Traits = WidenedTraits<ForwardRow<FLASH3_KERNEL_OF(ELEMENT, kRow)>>;        \
    using Roles = Consumer<Traits, OperandsWidened<Traits>, StoreInPlaceOfQ<Traits>>; \
    using Loads = WidenedProducer<Traits>;                                            \
    return reinterpret_cast<const void*>(&forward_kernel<Traits, Loads, Roles>);      \
  }                                                                                   \
  }
