// SPDX-License-Identifier: Apache-2.0
// What a generated file of a latent kernel includes (cmake/kernel_instances.cmake).
#pragma once

#include "hopper/decode/instances.hpp"
#include "hopper/decode/latent/kernel.cuh"

#define FLASH3_LATENT_INSTANCE(ELEMENT)                                                    \
  template <>                                                                              \
  const void* flash3::hopper::latent_kernel_function<flash3::hopper::Element::ELEMENT>() { \
    return reinterpret_cast<const void*>(&latent_kernel<LatentTraits<Element::ELEMENT>>);  \
  }
