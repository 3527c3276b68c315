// SPDX-License-Identifier: Apache-2.0
// What a generated file of an FP8 kernel includes (cmake/kernel_instances.cmake): the kernel of one
// row, put together from its policies.
#pragma once

#include "hopper/forward/instances.hpp"
#include "hopper/forward/kernel.cuh"
#include "hopper/forward/load_fp8.cuh"
#include "hopper/forward/operands_fp8.cuh"
#include "hopper/forward/store_fp8.cuh"

#define FLASH3_KERNEL_INSTANCE(ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND, SCORE, TILE_M, TILE_N)     \
  template <>                                                                                  \
  const void* flash3::hopper::forward_kernel_function<                                         \
      flash3::hopper::Element::ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND,                            \
      flash3::hopper::ScoreKind::SCORE, TILE_M, TILE_N>() {                                    \
    using Traits = Fp8Traits<ForwardRow<Element::ELEMENT, HEAD_DIM, HEAD_DIM_V, BAND,          \
                                        ScoreKind::SCORE, TILE_M, TILE_N>>;                    \
    using Roles = Consumer<Traits, OperandsFp8<Traits>, StoreFp8<Traits>>;                     \
    return reinterpret_cast<const void*>(&forward_kernel<Traits, Fp8Producer<Traits>, Roles>); \
  }
