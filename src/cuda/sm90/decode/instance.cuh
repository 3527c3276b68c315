// SPDX-License-Identifier: Apache-2.0
// What a generated file of a decode kernel includes (cmake/kernel_instances.cmake).
#pragma once

#include "cuda/sm90/decode/instances.hpp"
#include "cuda/sm90/decode/kernel.cuh"

#define FLASH3_DECODE_INSTANCE(ELEMENT, HEAD_DIM, HEAD_DIM_V, ROWS, CAPPED)                        \
  template <>                                                                                      \
  const void* flash3::cuda::sm90::decode_kernel_function<flash3::cuda::Element::ELEMENT, HEAD_DIM, \
                                                         HEAD_DIM_V, ROWS, CAPPED>() {             \
    using Traits = DecodeTraits<Element::ELEMENT, HEAD_DIM, HEAD_DIM_V, ROWS, CAPPED>;             \
    return reinterpret_cast<const void*>(&decode_kernel<Traits>);                                  \
  }
