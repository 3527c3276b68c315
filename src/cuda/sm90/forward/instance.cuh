// SPDX-License-Identifier: Apache-2.0
// What a generated file of a 16-bit kernel includes (cmake/kernel_instances.cmake): the kernels of
// one row, put together from its policies.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load.cuh"
#include "cuda/sm90/forward/operands_16bit.cuh"
#include "cuda/sm90/forward/store.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT)                                             \
  namespace flash3::cuda::sm90 {                                                    \
  FLASH3_FORWARD_ROW(ELEMENT)                                                       \
  template <>                                                                       \
  const void* forward_kernel_function<FLASH3_KERNEL_OF(ELEMENT, kRow)>() {          \
    using Traits = ForwardTraits<ForwardRow<FLASH3_KERNEL_OF(ELEMENT, kRow)>>;      \
    using Roles = Consumer<Traits, Operands16Bit<Traits>, StoreInPlaceOfQ<Traits>>; \
    using Loads = Producer16Bit<Traits, kRow.paged>;                                \
    return reinterpret_cast<const void*>(&forward_kernel<Traits, Loads, Roles>);    \
  }                                                                                 \
  }
