// SPDX-License-Identifier: Apache-2.0
// What a generated file of a latent kernel includes (cmake/kernel_instances.cmake).
#pragma once

#include "cuda/sm90/decode/instances.hpp"
#include "cuda/sm90/decode/latent/kernel.cuh"

#define FLASH3_LATENT_INSTANCE(ELEMENT)                                                      \
  template <>                                                                                \
  const void* flash3::cuda::sm90::latent_kernel_function<flash3::cuda::Element::ELEMENT>() { \
    return reinterpret_cast<const void*>(&latent_kernel<LatentTraits<Element::ELEMENT>>);    \
  }
