// SPDX-License-Identifier: Apache-2.0
// What a generated file of a kernel of widened K and V includes (cmake/kernel_instances.cmake): the
// kernels of one row, put together from their policies.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load_widened.cuh"
#include "cuda/sm90/forward/operands_widened.cuh"
#include "cuda/sm90/forward/store.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT)                                               \
  namespace flash3::cuda::sm90 {                                                      \
  FLASH3_FORWARD_ROW(ELEMENT)                                                         \
  template <>                                                                         \
  const void* forward_kernel_function<FLASH3_KERNEL_OF(ELEMENT, kRow)>() {            \
    using Traits = WidenedTraits<ForwardRow<FLASH3_KERNEL_OF(ELEMENT, kRow)>>;        \
    using Roles = Consumer<Traits, OperandsWidened<Traits>, StoreInPlaceOfQ<Traits>>; \
    using Loads = WidenedProducer<Traits>;                                            \
    return reinterpret_cast<const void*>(&forward_kernel<Traits, Loads, Roles>);      \
  }                                                                                   \
  }
